"""What will disappoint although it is possible: warnings about a valid CacheCluster. Pure.

Called by judge.py. Sizes are at least those estimated from the model's name, speeds those of a usual
accelerator and a good disk: a warning is an estimate, and silence is no promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvist_connector.planner import PrefillModel, TierPrice, plan_load
from kvist_connector.quantity import format_bytes, format_quantity
from kvist_operator.plan import kube_target
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.amounts import round_up
from kvist_operator.spec.checks import Facts, Violation, chunk_fits, prompt_fits
from kvist_operator.spec.model_facts import ModelFacts
from kvist_operator.webhook.estimate import Size, estimate

_MEBIBYTE: Final = 1024**2
# Two floating-point operations per parameter and token, on each device.
_OPERATIONS: Final = {"cuda": 2e14, "cpu": 1e12}
_LOCAL_DISK: Final = TierPrice(0.0001, 5e9)
_NETWORK_DISK: Final = TierPrice(0.001, 1e9)
_CHUNKS: Final = 32  # a long prompt: latency counts for little
REDIS_LIMIT: Final = 512 * _MEBIBYTE  # proto-max-bulk-len
REDIS_LARGE: Final = 24 * _MEBIBYTE  # tens of milliseconds of a Redis that does nothing else meanwhile
Advice = Callable[[CacheCluster, Size], Violation | None]


def advice(cluster: CacheCluster) -> tuple[str, ...]:
    """One line each; empty when there is nothing to say. Of a model of unknown size there is less to say."""
    found, size = [hub_is_reached(cluster)], estimate(cluster)
    if size is not None and cluster.spec.cache.enabled:
        found += [check(cluster, size) for check in ADVICE]
    return tuple(said(violation) for violation in found if violation is not None)


def said(violation: Violation) -> str:
    """As a warning: it is possible after all."""
    return f"{violation.field}: {violation.value}: {violation.reason}; {violation.remedy}"


def hub_is_reached(cluster: CacheCluster) -> Violation | None:
    """Pods that may reach nothing outside fetch no model."""
    policy, model = cluster.spec.security.network_policy, cluster.spec.model
    if not (policy.enabled and policy.egress and model.from_hub) or policy.egress_to:
        return None
    return Violation(
        "spec.security.networkPolicy.egress",
        "true",
        f"pods cannot fetch {model.name} from the hub",
        "name the hub or a mirror in egressTo, or put the model into model.volume",
    )


def holds_a_chunk(cluster: CacheCluster, size: Size) -> Violation | None:
    """A tier that cannot hold one chunk never holds anything."""
    return chunk_fits(cluster, _facts(size))


def engine_holds_a_prompt(cluster: CacheCluster, size: Size) -> Violation | None:
    """vLLM would refuse to start."""
    return prompt_fits(cluster, _facts(size))


def memory_holds_a_prompt(cluster: CacheCluster, size: Size) -> Violation | None:
    """The end of a prompt would push its own beginning out."""
    memory, longest = cluster.spec.cache.memory, cluster.spec.engine.max_model_len
    need = (longest or 0) * size.kv_bytes_per_token
    if not 0 < memory < need:
        return None
    return Violation(
        "spec.cache.memory",
        format_quantity(memory),
        f"one prompt of {longest} tokens takes about {format_bytes(need)} or more",
        f"set at least {format_quantity(round_up(need))}, or less engine.maxModelLen",
    )


def disk_beats_computing(cluster: CacheCluster, size: Size) -> Violation | None:
    """The planner would compute again what the disk holds."""
    disk, engine = cluster.spec.cache.disk, cluster.spec.engine
    if disk is None:
        return None
    speed = _OPERATIONS[kube_target(cluster).device] * engine.tensor_parallel_size
    price = _LOCAL_DISK if disk.volume_claim_template is None else _NETWORK_DISK
    tokens = cluster.spec.cache.chunk_tokens
    chunks = [(price, tokens * size.kv_bytes_per_token)] * _CHUNKS
    prefill = PrefillModel(2 * size.parameters / speed)
    if plan_load(chunks, prefill, tokens).chunks > 0:
        return None
    return Violation(
        "spec.cache.disk",
        format_quantity(disk.size),
        f"reading back at {price.bandwidth / 1e9:g} GB/s is slower than computing again, as estimated",
        "use a faster volume, or leave it out: what is slower is not read",
    )


def redis_values(cluster: CacheCluster, size: Size) -> Violation | None:
    """A chunk is one value, and Redis answers nobody else while it handles one."""
    chunk = cluster.spec.cache.chunk_tokens * size.kv_bytes_per_token
    if cluster.spec.cache.remote.redis is None or chunk < REDIS_LARGE:
        return None
    reason = f"a chunk, one value, takes about {format_bytes(chunk)} or more"
    if chunk > REDIS_LIMIT:
        reason += f", and Redis refuses more than {format_bytes(REDIS_LIMIT)}"
    return Violation("spec.cache.remote.redis", "given", reason, "use objectStore, or more Redis servers")


def redis_holds_a_prompt(cluster: CacheCluster, size: Size) -> Violation | None:
    """Of a managed one the size is known."""
    redis, longest = cluster.spec.cache.remote.redis, cluster.spec.engine.max_model_len
    if redis is None or redis.managed is None or longest is None:
        return None
    need = longest * size.kv_bytes_per_token // redis.managed.replicas
    if redis.managed.memory >= need:
        return None
    return Violation(
        "spec.cache.remote.redis.managed.memory",
        format_quantity(redis.managed.memory),
        f"one prompt of {longest} tokens takes about {format_bytes(need)} or more on each of "
        f"{redis.managed.replicas}",
        f"set at least {format_quantity(round_up(need))}, or more replicas",
    )


def _facts(size: Size) -> Facts:
    return Facts(model=ModelFacts(size.kv_bytes_per_token, None))


ADVICE: Final[tuple[Advice, ...]] = (
    holds_a_chunk,
    engine_holds_a_prompt,
    memory_holds_a_prompt,
    disk_beats_computing,
    redis_values,
    redis_holds_a_prompt,
)
