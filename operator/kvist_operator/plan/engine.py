"""The engine's command line. Flags and environment are those of vLLM 0.32."""

from __future__ import annotations

import json
from typing import Final

from kvist_operator.plan.program import Health, Program, Role, Volume, VolumeKind
from kvist_operator.plan.target import Target
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.engine import CPU_BLOCK_TOKENS, CPU_KV_BYTES

CONNECTOR: Final = "KvistConnector"
CONNECTOR_MODULE: Final = "kvist_connector.engines.vllm.connector"
ENGINE_MODULE: Final = "vllm.entrypoints.openai.api_server"


def engine_program(cluster: CacheCluster, target: Target) -> Program:
    """One engine of the pool."""
    cached = cluster.spec.cache.enabled
    return Program(
        role=Role.ENGINE,
        module=ENGINE_MODULE,
        argv=tuple(_arguments(cluster, target)),
        env=_environment(cluster, target),
        # It would override --kv-cache-memory-bytes.
        unset=("VLLM_CPU_KVCACHE_SPACE",),
        health=Health("engine", "/health", cluster.spec.engine.startup_deadline),
        ports=("engine",),
        volumes=(Volume(VolumeKind.MODEL), *((Volume(VolumeKind.RUN),) if cached else ())),
        devices=cluster.spec.engine.tensor_parallel_size if target.device == "cuda" else 0,
        after=(Role.AGENT,) if cached else (),
    )


def _arguments(cluster: CacheCluster, target: Target) -> list[str]:
    engine, cpu = cluster.spec.engine, target.device == "cpu"
    arguments = ["--model", "$(path.model)", "--served-model-name", cluster.served_name]
    arguments += _revision(cluster)
    arguments += ["--host", "$(host)", "--port", "$(port.engine)", "--dtype", engine.dtype]
    if engine.tensor_parallel_size > 1:
        arguments += ["--tensor-parallel-size", str(engine.tensor_parallel_size)]
    block = engine.block_size or (CPU_BLOCK_TOKENS if cpu else None)
    if block is not None:
        arguments += ["--block-size", str(block)]
    if engine.max_model_len is not None:
        arguments += ["--max-model-len", str(engine.max_model_len)]
    memory = engine.kv_cache_memory or (CPU_KV_BYTES if cpu else None)
    if memory is not None:
        arguments += ["--kv-cache-memory-bytes", str(memory)]
    if engine.enforce_eager if engine.enforce_eager is not None else cpu:
        arguments += ["--enforce-eager"]
    # Health checks come every few seconds for ever; they are not what a log is read for.
    arguments += ["--disable-access-log-for-endpoints", "/health,/metrics"]
    arguments += _lora(cluster)
    if cluster.spec.cache.enabled:
        arguments += [
            "--kv-transfer-config",
            _compact(_transfer(cluster)),
            "--kv-events-config",
            _compact(_events()),
        ]
    return [*arguments, *engine.extra_args]


def _revision(cluster: CacheCluster) -> list[str]:
    """Of weights on the hub; vLLM takes the tokenizer of the same. A folder has none."""
    model = cluster.spec.model
    return ["--revision", model.revision] if model.revision is not None and model.from_hub else []


def _lora(cluster: CacheCluster) -> list[str]:
    adapters = cluster.spec.model.lora_adapters
    if not adapters:
        return []
    modules = [json.dumps({"name": a.name, "path": f"$(lora.{a.name})"}) for a in adapters]
    return ["--enable-lora", "--lora-modules", *modules]


def _transfer(cluster: CacheCluster) -> dict[str, object]:
    extra: dict[str, object] = {"agent": "$(path.socket)"}
    if cluster.spec.model.revision is not None:
        extra["revision"] = cluster.spec.model.revision
    revisions = {a.name: a.revision for a in cluster.spec.model.lora_adapters if a.revision}
    if revisions:
        extra["lora_revisions"] = revisions
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _events() -> dict[str, object]:
    # vLLM binds an ipc endpoint, but *connects* to a TCP one without a wildcard, as the agent does:
    # nobody would listen. A socket beside the agent's also opens no port to other users' processes.
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc://$(path.events)",
        "replay_endpoint": "ipc://$(path.replay)",
        "topic": "",
    }


def _environment(cluster: CacheCluster, target: Target) -> dict[str, str]:
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # vLLM seeds its block hashes from it: equal in all processes of an engine.
        "PYTHONHASHSEED": "0",
        # Status lines of the log are read by people, not by a terminal.
        "NO_COLOR": "1",
        **target.engine_env,
    }
    for variable in cluster.spec.engine.env:
        if variable.value is not None:
            environment[variable.name] = variable.value
    return environment


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
