"""What makes a CacheCluster impossible on Kubernetes, whether or not the API server says so too.

Called by the operator before it plans. Pure: the first violation, with what to do.
"""

from __future__ import annotations

from typing import Final

from kvist_connector.quantity import format_quantity, parse_quantity
from kvist_operator.spec.amounts import gpu_resource, round_up
from kvist_operator.spec.checks import (
    Check,
    Facts,
    Violation,
    chunk_divides,
    chunk_supported,
    cpu_block,
    quotas_hold_a_chunk,
)
from kvist_operator.spec.cluster import MAX_NAME, CacheCluster


def kube_violation(cluster: CacheCluster, *, cpu: bool) -> Violation | None:
    """The first reason why this cannot run on Kubernetes; `cpu`: engines compute on CPUs."""
    facts = Facts(cpu=cpu)
    return next((found for check in KUBE_CHECKS if (found := check(cluster, facts)) is not None), None)


def name_fits(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """A Service's name begins with a letter; a StatefulSet's pods carry it in a label with a limit."""
    name = cluster.name
    if name[0].isalpha() and len(name) <= MAX_NAME:
        return None
    reason = f"names of Services begin with it: a letter comes first, and at most {MAX_NAME} characters fit"
    return Violation("metadata.name", name, reason, "make a cluster of another name")


def model_is_there(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """Pods see no folder of this machine."""
    model = cluster.spec.model
    if model.volume is not None or model.from_hub:
        return None
    return Violation(
        "spec.model.name",
        model.name,
        "pods can fetch Hugging Face names only",
        "put the model into a volume and name it in model.volume",
    )


def adapters_are_there(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """Folders of adapters lie in the model's volume."""
    model = cluster.spec.model
    for i, adapter in enumerate(model.lora_adapters):
        if model.volume is None and adapter.path.startswith(("/", ".", "~")):
            return Violation(
                f"spec.model.loraAdapters[{i}].path",
                adapter.path,
                "it is a folder, and there is no model.volume",
                "put it into a volume and name that in model.volume, or give a Hugging Face name",
            )
    return None


def devices_match(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """Each rank of a replica computes on a device of its own."""
    engine = cluster.spec.engine
    amounts = {**engine.resources.requests, **engine.resources.limits}
    name = gpu_resource(amounts)
    if name is None or engine.device == "cpu" or str(amounts[name]) == str(engine.tensor_parallel_size):
        return None
    return Violation(
        f"spec.engine.resources.limits[{name}]",
        str(amounts[name]),
        f"engine.tensorParallelSize is {engine.tensor_parallel_size}, and each rank takes one device",
        f"set {engine.tensor_parallel_size}, or leave it out",
    )


def claim_holds_disk(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """A disk tier larger than its volume evicts by 'no space left'; a claim's size cannot change."""
    disk = cluster.spec.cache.disk
    if disk is None or disk.volume_claim_template is None:
        return None
    resources = disk.volume_claim_template.get("resources")
    requests = resources.get("requests") if isinstance(resources, dict) else None
    storage = requests.get("storage") if isinstance(requests, dict) else None
    field = "spec.cache.disk.volumeClaimTemplate.resources.requests.storage"
    need = format_quantity(round_up(disk.size + disk.size // 50))
    if storage is None:
        return Violation(field, "nothing", "a claim needs a size", f"set at least {need}")
    try:
        holds = parse_quantity(storage) >= disk.size
    except ValueError as error:
        return Violation(field, str(storage), str(error), f"set at least {need}")
    if holds:
        return None
    reason = f"cache.disk.size is {format_quantity(disk.size)}"
    return Violation(field, str(storage), reason, f"set at least {need}, or a smaller cache.disk.size")


def something_is_cleared(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """A managed Redis goes with its cluster: only what outlives it can be cleared."""
    remote = cluster.spec.cache.remote
    if remote.when_deleted == "Retain" or remote.object_store or (remote.redis and remote.redis.urls):
        return None
    return Violation(
        "spec.cache.remote.whenDeleted",
        remote.when_deleted,
        "there is no external Redis and no object store to clear",
        "name one in spec.cache.remote, or leave whenDeleted out",
    )


def something_is_encrypted(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """Memory is never encrypted: whoever gives keys must not believe that it is."""
    cache = cluster.spec.cache
    if cache.encryption.keys is None or cache.disk or cache.remote.redis or cache.remote.object_store:
        return None
    return Violation(
        "spec.cache.encryption.keys",
        "a Secret",
        "chunks leave memory only with a disk, a Redis or an object store",
        "add one of them, or leave it out",
    )


def egress_is_restricted(cluster: CacheCluster, facts: Facts) -> Violation | None:
    """Exceptions from a rule that is off."""
    policy = cluster.spec.security.network_policy
    if not policy.egress_to or policy.egress:
        return None
    return Violation(
        "spec.security.networkPolicy.egressTo",
        f"a list of {len(policy.egress_to)}",
        "it has no effect without egress: true",
        "set egress: true, or leave it out",
    )


KUBE_CHECKS: Final[tuple[Check, ...]] = (
    name_fits,
    model_is_there,
    adapters_are_there,
    chunk_supported,
    quotas_hold_a_chunk,
    cpu_block,
    chunk_divides,
    devices_match,
    claim_holds_disk,
    something_is_cleared,
    something_is_encrypted,
    egress_is_restricted,
)
