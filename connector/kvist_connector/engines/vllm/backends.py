"""What of the attention implementation decides the order of bytes inside a page.

Called by the worker half. Backends keep K and V in orders of their own that shapes do not
show, and a new engine version may change them: name, version and, on CPUs, the
instruction set go into the fingerprint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm

from kvist_connector.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def describe_backends(vllm_config: VllmConfig, layer_names: list[str]) -> str:
    """`vllm <version>; <backend>` and what else the layout depends on; equal for equal layouts."""
    layers = vllm_config.compilation_config.static_forward_context
    names: set[str] = set()
    for name in layer_names:
        layer = layers.get(name)
        if layer is None or not hasattr(layer, "get_attn_backend"):
            raise UnsupportedError(
                f"layer {name} is no attention layer of the engine, so its KV layout cannot be told; "
                "start the engine without --kv-transfer-config"
            )
        names.add(_name(layer, vllm_config))
    return f"vllm {vllm.__version__}; {', '.join(sorted(names))}"


def _name(layer: object, vllm_config: VllmConfig) -> str:
    backend = layer.get_attn_backend()  # type: ignore[attr-defined]
    name = str(backend.get_name())
    impl = getattr(layer, "impl", None)
    isa = getattr(impl, "isa", None)
    if name.startswith("CPU"):
        isa = isa or _cpu_isa(layer, vllm_config)
    return f"{name}[{isa}]" if isa else name


def _cpu_isa(layer: object, vllm_config: VllmConfig) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(
        _get_attn_isa(
            vllm_config.model_config.dtype,
            vllm_config.cache_config.block_size,
            getattr(layer, "head_size", None),
            vllm_config.cache_config.cache_dtype,
        )
    )
