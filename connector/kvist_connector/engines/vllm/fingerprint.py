"""The fingerprint: everything that makes KV differ for equal tokens.

Computed by every worker from its own engine; ranks must agree (the agent compares).
Nothing here depends on paths, machines or process state, so equal engines on two
machines share chunks; anything that could change KV bytes changes it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvist_connector.engines.vllm.config import EngineConfig
from kvist_connector.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FORMAT = 1
FINGERPRINT_BYTES = 32
GROUP = 0  # the one KV group of full attention
_MAX_HEADER = 256 * 1024 * 1024
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "auto_map"})
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def describe_engine(
    vllm_config: VllmConfig, config: EngineConfig, layout: str, backends: str
) -> dict[str, str]:
    """The parts of the fingerprint, readable: also shown by `kvist status` and in refusals."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    return {
        "format": str(FORMAT),
        "model_config": _digest_json(_plain(model.hf_config.to_dict())),
        "weights": weights_identity(str(model.model), str(vllm_config.load_config.load_format)),
        "revision": config.extra.revision,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "cache_scales": str(getattr(cache, "calculate_kv_scales", False)),
        "layout": layout,
        "backends": backends,
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "block_tokens": str(config.block_tokens),
        "chunk_tokens": str(config.chunk_tokens),
        "group": str(GROUP),
    }


def fingerprint(parts: Mapping[str, str]) -> bytes:
    """Digest of the parts; names and values are length-prefixed."""
    digest = blake3(b"kvist fingerprint")
    for name in sorted(parts):
        for text in (name.encode(), parts[name].encode()):
            digest.update(struct.pack("<I", len(text)) + text)
    return digest.digest(FINGERPRINT_BYTES)


def weights_identity(model: str, load_format: str) -> str:
    """Commit of a hub snapshot, else a digest of shard names, sizes and safetensors headers."""
    if load_format == "dummy":
        return "dummy"
    folder = Path(model)
    if not folder.exists():
        snapshot = _hub_snapshot(model)
        if snapshot is None:
            return f"name:{model}"
        folder = snapshot
    if folder.parent.name == "snapshots":
        return f"commit:{folder.name}"
    files = [folder] if folder.is_file() else _weight_files(folder)
    if not files:
        raise UnsupportedError(
            f"model {model}: no weight files to tell its KV by; set kv_connector_extra_config.revision "
            "and use a folder with safetensors"
        )
    digest = blake3()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(_header(file))
    return f"files:{digest.hexdigest(16)}"


def _weight_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.is_file())


def _header(file: Path) -> bytes:
    if file.suffix != ".safetensors":
        return b""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return stream.read(min(length, _MAX_HEADER))


def _hub_snapshot(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _plain(value: Any) -> Any:
    """JSON-able, without what differs between equal models."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if k not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _digest_json(value: Any) -> str:
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest(16)
