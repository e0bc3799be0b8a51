"""What the connector needs to know of the engine's configuration, checked once at start.

Called by connector.py in both halves. `kv_connector_extra_config` is strict: an unknown
name is refused with the nearest valid one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3
from pydantic import Field

from kvist_connector.errors import ConfigError, UnsupportedError
from kvist_connector.keys import CHUNK_TOKENS
from kvist_connector.quantity import Quantity
from kvist_connector.settings import Settings, validate

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

WHERE = "kv_connector_extra_config"


class ExtraConfig(Settings):
    """`kv_connector_extra_config` of `--kv-transfer-config`."""

    agent: str | None = Field(
        None, min_length=1, description="path of the agent's socket; absent: an agent is spawned"
    )
    memory: Quantity = Field(
        1024**3, description="memory tier of a spawned agent, bytes or quantity (8Gi); default 1Gi"
    )
    disk: str | None = Field(
        None, min_length=1, description="folder of a spawned agent's disk tier; absent: no disk tier"
    )
    disk_size: Quantity | None = Field(
        None,
        gt=0,
        description="most bytes of a spawned agent's disk tier, bytes or quantity (20Gi); default 10Gi",
    )
    folder: str | None = Field(
        None,
        min_length=1,
        description="where a spawned agent keeps socket, arena and log; default /dev/shm/kvist-<uid>/<model>",
    )
    revision: str = Field("", description="user-set part of the weights identity; change it with the weights")
    decoded_reuse: float = Field(
        0.05,
        ge=0,
        le=1,
        description="chunks of answers are stored while at least this share of answers is found again by the "
        "next prompt of their conversation; 0: always",
    )
    lora_revisions: dict[str, str] = Field(
        {}, description="the same of LoRA adapters, by their names", max_length=256
    )


@dataclass(frozen=True)
class EngineConfig:
    """Facts of this engine, equal in both halves. Token counts, and blocks of the KV space."""

    extra: ExtraConfig
    engine: str
    model: str
    block_tokens: int
    chunk_tokens: int
    num_blocks: int
    ranks: int
    overlapping_steps: bool  # a step is planned before the one before it has been reported

    @property
    def blocks_per_chunk(self) -> int:
        """Engine pages of one chunk."""
        return self.chunk_tokens // self.block_tokens


def read_config(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineConfig:
    """Refuse what cannot work, in words; else the facts."""
    transfer = vllm_config.kv_transfer_config
    extra = validate(ExtraConfig, dict(transfer.kv_connector_extra_config or {}), WHERE)
    _check_extra(extra)
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy: {transfer.kv_load_failure_policy!r} would fail requests because of "
            'the cache; add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    if transfer.kv_role != "kv_both":
        raise ConfigError(f"kv_role: {transfer.kv_role!r} is not supported; use 'kv_both'")
    block_tokens = _check_groups(vllm_config, kv_cache_config)
    parallel = vllm_config.parallel_config
    return EngineConfig(
        extra=extra,
        engine=str(transfer.engine_id),
        model=str(vllm_config.model_config.model),
        block_tokens=block_tokens,
        chunk_tokens=CHUNK_TOKENS,
        num_blocks=kv_cache_config.num_blocks,
        ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        overlapping_steps=bool(vllm_config.scheduler_config.async_scheduling)
        or parallel.pipeline_parallel_size > 1,
    )


def own_folder(config: EngineConfig) -> Path:
    """Where a spawned agent lives; equal for all processes of one engine and its restarts."""
    if config.extra.folder is not None:
        return Path(config.extra.folder)
    identity = f"{config.model}|{config.extra.revision}|{config.block_tokens}|{config.ranks}"
    return Path(f"/dev/shm/kvist-{os.getuid()}") / blake3(identity.encode()).hexdigest(8)


def _check_extra(extra: ExtraConfig) -> None:
    if extra.disk_size is not None and extra.disk is None and extra.agent is None:
        raise ConfigError(f"{WHERE}.disk_size: is of a disk tier, but there is none: give {WHERE}.disk too")
    if extra.agent is None:
        return
    for name in ("memory", "disk", "disk_size", "folder"):
        if name in extra.model_fields_set and getattr(extra, name) is not None:
            raise ConfigError(
                f"{WHERE}.{name}: belongs to a spawned agent, but {WHERE}.agent names a running one; "
                "remove one of the two"
            )


def _check_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise UnsupportedError(
            f"the model has {len(groups)} KV cache groups ({', '.join(kinds)}); Kvist supports models with "
            "one group of full attention; start the engine without --kv-transfer-config"
        )
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec) or getattr(spec, "non_causal", False):
        raise UnsupportedError(
            f"KV cache of kind {type(spec).__name__} is not supported, only causal full attention; "
            "start the engine without --kv-transfer-config"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(f"{name} {getattr(parallel, name)}: context parallelism is not supported")
    block_tokens = int(spec.block_size)
    if CHUNK_TOKENS % block_tokens:
        raise ConfigError(
            f"--block-size {block_tokens}: does not divide the chunk of {CHUNK_TOKENS} tokens; "
            "use 16, 32, 64, 128 or 256"
        )
    return block_tokens
