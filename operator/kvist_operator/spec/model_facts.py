"""What a model's config.json says about the size of its KV. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class ModelFacts:
    """Figures of one model; None where its config does not say."""

    kv_bytes_per_token: int | None
    max_tokens: int | None


def model_facts(config: Mapping[str, Any], dtype: str = "auto") -> ModelFacts:
    """From config.json as parsed; `dtype` is engine.dtype."""
    text = config.get("text_config")
    body: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    name = str(body.get("dtype") or body.get("torch_dtype") or "") if dtype == "auto" else dtype
    size = _DTYPE_BYTES.get(name.removeprefix("torch."))
    values = _values_per_token(body)
    limit = body.get("max_position_embeddings")
    return ModelFacts(
        kv_bytes_per_token=size * values if size is not None and values is not None else None,
        max_tokens=limit if isinstance(limit, int) else None,
    )


def _values_per_token(config: Mapping[str, Any]) -> int | None:
    """Numbers stored for one token over all layers; None for layouts that are not plain attention."""
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int) or "layer_types" in config:
        return None
    latent = config.get("kv_lora_rank")
    if isinstance(latent, int):  # multi-head latent attention: one latent and one rotary part
        return layers * (latent + int(config.get("qk_rope_head_dim") or 0))
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or int(config.get("hidden_size") or 0) // heads
    return 2 * layers * int(kv_heads) * int(width) or None
