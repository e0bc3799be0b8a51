"""Checks that need more than one field, the model or the machine. Pure: facts in, first violation out.

Called by `kvist up` before anything starts, and by the operator with the facts that it has.
A check is a function of (cluster, facts) that returns a Violation or None; CHECKS are asked in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvist_connector.keys import CHUNK_TOKENS
from kvist_connector.quantity import format_bytes, format_quantity
from kvist_operator.spec.amounts import round_down, round_up
from kvist_operator.spec.cluster import CacheCluster
from kvist_operator.spec.engine import CPU_BLOCK_TOKENS, CPU_KV_BYTES
from kvist_operator.spec.model_facts import ModelFacts

# Beside slots the arena holds a superblock, headers and padding.
_ARENA_OVERHEAD: Final = 64 * 1024


@dataclass(frozen=True)
class Facts:
    """Snapshot of a machine; None = not known, the checks that need it are left out."""

    memory_total: int | None = None  # bytes, of the machine or this process's limit
    memory_free: int | None = None
    arena_free: int | None = None  # bytes free where arenas lie, those of this cluster counted as free
    disk_free: int | None = None  # bytes free where disk tiers lie, chunks of this cluster counted as free
    devices: int | None = None  # CUDA devices
    model: ModelFacts | None = None
    cpu: bool = False  # engines compute on the CPU


@dataclass(frozen=True)
class Violation:
    """What is wrong and what to do about it."""

    field: str
    value: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.value} is not possible: {self.reason}; {self.remedy}"


Check = Callable[[CacheCluster, Facts], Violation | None]


def first_violation(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """The first check that fails, or None."""
    return next((found for check in CHECKS if (found := check(cluster, facts)) is not None), None)


def chunk_supported(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """The engine adapter of this release cuts chunks of one length."""
    wished = cluster.spec.cache.chunk_tokens
    if wished == CHUNK_TOKENS:
        return None
    return Violation(
        "spec.cache.chunkTokens",
        str(wished),
        f"this release stores chunks of {CHUNK_TOKENS} tokens",
        f"leave it out or set {CHUNK_TOKENS}",
    )


def quotas_hold_a_chunk(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """Less than a chunk is none: that must be meant."""
    for i, tenant in enumerate(cluster.spec.router.tenants):
        tokens = tenant.cache_tokens
        if tokens is not None and 0 < tokens < CHUNK_TOKENS:
            return Violation(
                f"spec.router.tenants[{i}].cacheTokens",
                str(tokens),
                f"one chunk has {CHUNK_TOKENS} tokens",
                f"set at least {CHUNK_TOKENS}, or 0 to keep nothing of it",
            )
    return None


def chunk_divides(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """Loads and stores move whole blocks of a chunk."""
    cache, engine = cluster.spec.cache, cluster.spec.engine
    block = engine.block_size or (CPU_BLOCK_TOKENS if facts.cpu else 16)
    if not cache.enabled or cache.chunk_tokens % block == 0:
        return None
    return Violation(
        "spec.engine.blockSize",
        str(block),
        f"chunks of {cache.chunk_tokens} tokens are not a multiple of it",
        f"leave it out or set a divisor of {cache.chunk_tokens}",
    )


def cpu_block(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """vLLM's CPU attention."""
    block = cluster.spec.engine.block_size
    if not facts.cpu or block is None or block % CPU_BLOCK_TOKENS == 0:
        return None
    return Violation(
        "spec.engine.blockSize",
        str(block),
        "engines on CPUs need a multiple of 32 tokens",
        "leave it out or set 32",
    )


def chunk_fits(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """A tier that cannot hold one chunk never holds anything."""
    per_token = facts.model.kv_bytes_per_token if facts.model else None
    if not cluster.spec.cache.enabled or per_token is None:
        return None
    cache = cluster.spec.cache
    chunk = cache.chunk_tokens * per_token
    tiers = [("spec.cache.memory", cache.memory)]
    if cache.disk is not None:
        tiers.append(("spec.cache.disk.size", cache.disk.size))
    for field, size in tiers:
        if 0 < size < chunk + _ARENA_OVERHEAD:
            return Violation(
                field,
                format_quantity(size),
                f"one chunk of this model takes {format_bytes(chunk)} "
                f"({cache.chunk_tokens} tokens of {per_token} bytes)",
                f"set at least {format_quantity(round_up(chunk + _ARENA_OVERHEAD))}",
            )
    return None


def prompt_fits(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """The engine itself refuses a KV space that cannot hold one longest prompt."""
    engine, model = cluster.spec.engine, facts.model
    if engine.kv_cache_memory is None or model is None or model.kv_bytes_per_token is None:
        return None
    longest = engine.max_model_len or model.max_tokens
    space = engine.kv_cache_memory * engine.tensor_parallel_size
    if longest is None or longest * model.kv_bytes_per_token <= space:
        return None
    fitting = space // model.kv_bytes_per_token
    need = longest * model.kv_bytes_per_token // engine.tensor_parallel_size
    return Violation(
        "spec.engine.kvCacheMemory",
        format_quantity(engine.kv_cache_memory),
        f"one prompt of {longest} tokens takes {format_bytes(need)}",
        f"set at least {format_quantity(round_up(need))}"
        + (f", or engine.maxModelLen to at most {fitting}" if fitting else ""),
    )


def model_length(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """Longer than the model was made for."""
    wished, limit = cluster.spec.engine.max_model_len, facts.model.max_tokens if facts.model else None
    if wished is None or limit is None or wished <= limit:
        return None
    return Violation(
        "spec.engine.maxModelLen",
        str(wished),
        f"the model's config allows {limit} tokens",
        f"set at most {limit}",
    )


def arenas_fit(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """All arenas are reserved at start."""
    cache, replicas = cluster.spec.cache, cluster.spec.engine.replicas
    need = cache.memory * replicas
    if not cache.enabled or facts.arena_free is None or need <= facts.arena_free:
        return None
    return Violation(
        "spec.cache.memory",
        format_quantity(cache.memory),
        f"{replicas} replicas need {format_bytes(need)} and the arena folder has "
        f"{format_bytes(facts.arena_free)} free",
        f"set at most {format_quantity(round_down(facts.arena_free // max(1, replicas)))}",
    )


def memory_fits(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """Arenas and, on CPUs, the engines' KV spaces are memory of one machine."""
    engine, cache = cluster.spec.engine, cluster.spec.cache
    limit = facts.memory_free if facts.memory_free is not None else facts.memory_total
    if limit is None:
        return None
    arena = cache.memory if cache.enabled else 0
    kv = (engine.kv_cache_memory or CPU_KV_BYTES) if facts.cpu else 0
    if (arena + kv) * engine.replicas <= limit:
        return None
    field, size = ("spec.cache.memory", cache.memory) if arena >= kv else ("spec.engine.kvCacheMemory", kv)
    return Violation(
        field,
        format_quantity(size),
        f"{engine.replicas} replicas with {format_bytes(arena)} cache and {format_bytes(kv)} KV space need "
        f"{format_bytes((arena + kv) * engine.replicas)} and the machine has {format_bytes(limit)} free",
        "set less, or fewer engine.replicas",
    )


def disk_fits(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """The disk tiers of all replicas share one disk here."""
    cache, replicas = cluster.spec.cache, cluster.spec.engine.replicas
    if not cache.enabled or cache.disk is None or facts.disk_free is None:
        return None
    need = cache.disk.size * replicas
    if need <= facts.disk_free:
        return None
    return Violation(
        "spec.cache.disk.size",
        format_quantity(cache.disk.size),
        f"{replicas} replicas need {format_bytes(need)}, the disk has {format_bytes(facts.disk_free)} free",
        f"set at most {format_quantity(round_down(facts.disk_free // max(1, replicas)))}",
    )


def devices_suffice(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """Engines on CUDA take whole devices."""
    engine = cluster.spec.engine
    need = engine.replicas * engine.tensor_parallel_size
    if engine.device == "cpu" or facts.devices is None or (facts.cpu and engine.device == "auto"):
        return None
    if need <= facts.devices:
        return None
    return Violation(
        "spec.engine.replicas",
        str(engine.replicas),
        f"{need} CUDA devices are needed and {facts.devices} are here",
        "set fewer, or engine.device: cpu",
    )


CHECKS: Final[tuple[Check, ...]] = (
    chunk_supported,
    quotas_hold_a_chunk,
    cpu_block,
    chunk_divides,
    chunk_fits,
    model_length,
    prompt_fits,
    devices_suffice,
    arenas_fit,
    memory_fits,
    disk_fits,
)
