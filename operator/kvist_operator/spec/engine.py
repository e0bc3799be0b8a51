"""Section `engine`: the homogeneous pool of vLLM replicas."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from kvist_operator.spec.base import (
    Duration,
    EnvVar,
    Items,
    Named,
    Overlay,
    Quantity,
    Resources,
    Section,
    Text,
    passable,
    rules,
)

OWNED_FLAGS: Final = {
    "--model": "model.name",
    "--revision": "model.revision",
    "--served-model-name": "model.servedName",
    "--host": "the --host flag of kvist up",
    "--port": "the port flags of kvist up",
    "--tensor-parallel-size": "engine.tensorParallelSize",
    "-tp": "engine.tensorParallelSize",
    "--dtype": "engine.dtype",
    "--block-size": "engine.blockSize",
    "--max-model-len": "engine.maxModelLen",
    "--kv-cache-memory-bytes": "engine.kvCacheMemory",
    "--kv-transfer-config": "the section cache",
    "--kv-events-config": "the section cache",
    "--lora-modules": "model.loraAdapters",
    "--enable-lora": "model.loraAdapters",
}
_SHORTEST: Final = 3  # characters of a shortened flag
# CPU attention takes pages of a multiple of 32 tokens.
CPU_BLOCK_TOKENS: Final = 32
# vLLM's own choice on CPUs is a share of all memory, for every engine anew.
CPU_KV_BYTES: Final = 1024**3
Argument = Annotated[str, StringConstraints(max_length=4096), AfterValidator(passable)]


class Engine(Section):
    """vLLM replicas, all alike."""

    model_config = rules(
        (
            # As `_owner` has it. `size` keeps `--` out, with which every flag begins.
            "!has(self.extraArgs) || !self.extraArgs.map(a, "
            "a.split('=', 2)[0].split('.', 2)[0].replace('_', '-')).exists(f, "
            f"f == '--config' || f in {sorted(OWNED_FLAGS)} || f.startsWith('--') && "
            f"size(f) >= {_SHORTEST} && {sorted(OWNED_FLAGS)}.exists(o, o.startsWith(f)))",
            "extraArgs holds a flag that other fields set, short for one or a part of one, or --config: "
            + ", ".join(sorted(OWNED_FLAGS)),
        ),
    )

    image: Text | None = Field(
        default=None, description="Container image. Kubernetes only. Default: the one of this release."
    )
    replicas: int = Field(default=1, ge=0, le=1024, description="Number of engines. Default: 1.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="What engines compute on: auto takes CUDA where a device is. Default: auto.",
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, le=64, description="Devices that share one replica. Default: 1."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Type of weights and KV. Default: auto, the one in the model's config."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Longest prompt plus answer, tokens. Default: the model's own limit.",
    )
    kv_cache_memory: Quantity | None = Field(
        default=None,
        description="KV space inside each engine, bytes. Default: the engine's own choice, 1Gi on CPUs.",
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Tokens of a block; divides cache.chunkTokens. Default: the engine's, 32 on CPUs.",
    )
    enforce_eager: bool | None = Field(
        default=None,
        description="Skip compilation and CUDA graphs. Default: true on CPUs (starts faster), else false.",
    )
    startup_deadline: Duration = Field(
        default=1200.0,
        gt=0,
        description="Time until a started engine must be healthy; large models load long. Default: 20m.",
    )
    drain_deadline: Duration = Field(
        default=120.0,
        ge=0,
        le=3600,
        description="Time that a replica has to end its streams and hand over its chunks before it goes. "
        "Kubernetes only. Default: 2m.",
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Of the engine container; on CUDA without a GPU resource, tensorParallelSize "
        "nvidia.com/gpu are added. Kubernetes only. Default: none.",
    )
    shm_size: Quantity = Field(
        default=2 * 1024**3, description="The engine's own /dev/shm, bytes. Kubernetes only. Default: 2Gi."
    )
    extra_args: Annotated[Items[Argument], Field(max_length=256)] = Field(
        default=(), description="More arguments of the vLLM server, appended. Default: none."
    )
    env: Named[EnvVar] = Field(
        default=(),
        description="More environment variables of the engine. Default: none.",
    )
    pod_template: Overlay = Field(
        default_factory=dict,
        description="Merged over the rendered pod template. Kubernetes only. Default: empty.",
    )

    @model_validator(mode="after")
    def _no_owned_flags(self) -> Self:
        for argument in self.extra_args:
            owner = _owner(argument)
            if owner is not None:
                raise ValueError(f"extraArgs: {argument!r} is set by Kvist; use {owner}")
        return self


def _owner(argument: str) -> str | None:
    """Which field sets what an argument would: vLLM takes `--flag.key value`, and shortened flags."""
    flag = argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    if flag == "--config":
        return "extraArgs itself, since a file of arguments could hold any"
    if flag in OWNED_FLAGS or not flag.startswith("--") or len(flag) < _SHORTEST:
        return OWNED_FLAGS.get(flag)
    return next((owner for owned, owner in OWNED_FLAGS.items() if owned.startswith(flag)), None)
