"""What the place where engines run is like: the one input of a plan beside the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Target:
    """`engine_env` is environment that only this kind of place needs."""

    device: Literal["cpu", "cuda"]
    engine_env: Mapping[str, str] = field(default_factory=dict)


def cpu_target(cores: int, *, offline: bool) -> Target:
    """Engines on the CPUs of one machine, which they share.

    vLLM binds each engine's threads to cores of its own choice, which is the same choice in every
    engine. Unbound threads, as many as cores, let one engine use all of them while the others idle;
    passive waiting keeps idle threads from spinning on a core that another engine needs.
    Measured with two engines on two cores (135M model): a token decoded by both at once takes 44 ms each
    passive and 109 ms spinning; alone 46 and 30 ms; prefill is equal, alone and together.
    """
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, cores)),
        "OMP_WAIT_POLICY": "passive",
    }
    return Target("cpu", environment | _offline(offline))


def cuda_target(*, offline: bool) -> Target:
    """Engines on CUDA devices of one machine or pod."""
    return Target("cuda", _offline(offline))


def _offline(offline: bool) -> dict[str, str]:
    # A model that is already in a folder must not make the engine ask the hub about it.
    return {"HF_HUB_OFFLINE": "1"} if offline else {}
