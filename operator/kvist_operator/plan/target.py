"""What the place where engines run is like: the one input of a plan beside the manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kvist_operator.spec import CacheCluster
from kvist_operator.spec.amounts import cpu_cores, gpu_resource


@dataclass(frozen=True)
class Target:
    """`engine_env` is environment that only this kind of place needs."""

    device: Literal["cpu", "cuda"]
    engine_env: Mapping[str, str] = field(default_factory=dict)
    discovery: Literal["file", "kubernetes"] = "file"  # how the router learns of replicas
    managed_redis: bool = False  # whether a Redis that the manifest wants managed runs here


# Unbound threads, passive waiting: see cpu_target.
_UNBOUND: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_WAIT_POLICY": "passive"}


def cpu_target(cores: int, *, offline: bool) -> Target:
    """Engines on the CPUs of one machine, which they share.

    vLLM binds each engine's threads to cores of its own choice, which is the same choice in every
    engine. Unbound threads, as many as cores, let one engine use all of them while the others idle;
    passive waiting keeps idle threads from spinning on a core that another engine needs.
    Measured with two engines on two cores (135M model): a token decoded by both at once takes 44 ms each
    passive and 109 ms spinning; alone 46 and 30 ms; prefill is equal, alone and together.
    """
    return Target("cpu", _cpu_environment(cores) | _offline(offline))


def cuda_target(*, offline: bool) -> Target:
    """Engines on CUDA devices of one machine or pod."""
    return Target("cuda", _offline(offline))


def kube_target(cluster: CacheCluster) -> Target:
    """Pods. `auto` computes on CUDA where the engine's resources name a GPU."""
    engine, volume = cluster.spec.engine, cluster.spec.model.volume
    amounts = {**engine.resources.requests, **engine.resources.limits}
    cuda = engine.device == "cuda" or (engine.device == "auto" and gpu_resource(amounts) is not None)
    cores = math.ceil(cpu_cores(amounts.get("cpu", 0)))
    environment = _offline(volume is not None)
    if not cuda:
        environment |= _cpu_environment(cores) if cores else dict(_UNBOUND)
    device: Literal["cpu", "cuda"] = "cuda" if cuda else "cpu"
    return Target(device, environment, "kubernetes", managed_redis=True)


def _cpu_environment(cores: int) -> dict[str, str]:
    return {**_UNBOUND, "OMP_NUM_THREADS": str(max(1, cores))}


def _offline(offline: bool) -> dict[str, str]:
    # A model that is already in a folder must not make the engine ask the hub about it.
    return {"HF_HUB_OFFLINE": "1"} if offline else {}
