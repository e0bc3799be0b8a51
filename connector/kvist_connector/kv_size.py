"""How much KV a token takes, from a model's config.json. Pure.

    keys and values     2 x layers x KV heads x head size x bytes of a number
    latents (MLA)       layers x (latent rank + rotary size) x bytes of a number

For layouts that are neither the answer is None with the reason, never a guess: a window keeps only the
last tokens of some layers, a recurrent layer keeps a state whose size does not grow with the prompt.
Called by the operator's checks and by `kvist size`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

_DTYPE_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
# Fields by which configs name layers that keep no keys and values of every token.
_RECURRENT: Final = (
    "ssm_state_size",
    "mamba_d_state",
    "mamba_d_ssm",
    "state_size",
    "linear_num_key_heads",
    "attn_layer_period",
    "hybrid_override_pattern",
    "lru_width",
)
_WHOLE: Final = "full_attention"


class KvKind(StrEnum):
    """Which formula holds."""

    ATTENTION = "keys and values of every token"
    LATENT = "latents (MLA)"
    OTHER = "not computed"


@dataclass(frozen=True)
class KvSize:
    """Of one model. `bytes_per_token` is None where `reason` says why it is not computed."""

    kind: KvKind
    bytes_per_token: int | None
    formula: str
    reason: str = ""
    max_tokens: int | None = None


def kv_size(config: Mapping[str, Any], dtype: str = "auto") -> KvSize:
    """From config.json as parsed; `dtype` is that of the KV cache, "auto" the model's own."""
    text = config.get("text_config")
    body: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    limit = _count(body, "max_position_embeddings")
    reason = _unlike(body)
    if reason:
        return KvSize(KvKind.OTHER, None, "", reason, limit)
    name = str(body.get("dtype") or body.get("torch_dtype") or "") if dtype == "auto" else dtype
    size = _DTYPE_BYTES.get(name.removeprefix("torch."))
    if size is None:
        known = ", ".join(_DTYPE_BYTES)
        return KvSize(KvKind.OTHER, None, "", f"the type of numbers is '{name}', not one of {known}", limit)
    found = _latent(body) if _count(body, "kv_lora_rank") else _attention(body)
    if isinstance(found, str):
        return KvSize(KvKind.OTHER, None, "", found, limit)
    kind, values, formula = found
    return KvSize(kind, values * size, f"{formula} x {size} bytes", "", limit)


def _attention(config: Mapping[str, Any]) -> tuple[KvKind, int, str] | str:
    layers, heads = _count(config, "num_hidden_layers"), _count(config, "num_attention_heads")
    if layers is None or heads is None:
        return "config.json does not say num_hidden_layers and num_attention_heads"
    kv_heads = _count(config, "num_key_value_heads") or heads
    width = _count(config, "head_dim") or (_count(config, "hidden_size") or 0) // heads
    if not width:
        return "config.json says neither head_dim nor hidden_size"
    formula = f"2 x {layers} layers x {kv_heads} KV heads x {width}"
    return KvKind.ATTENTION, 2 * layers * kv_heads * width, formula


def _latent(config: Mapping[str, Any]) -> tuple[KvKind, int, str] | str:
    layers, rank = _count(config, "num_hidden_layers"), _count(config, "kv_lora_rank")
    rotary = _count(config, "qk_rope_head_dim")
    if layers is None or rank is None or rotary is None:
        return "latent attention (kv_lora_rank) without num_hidden_layers or qk_rope_head_dim"
    return KvKind.LATENT, layers * (rank + rotary), f"{layers} layers x ({rank} latent + {rotary} rotary)"


def _unlike(config: Mapping[str, Any]) -> str:
    """Why no formula holds; empty if one does."""
    kinds = config.get("layer_types")
    others = sorted({str(kind) for kind in kinds} - {_WHOLE}) if isinstance(kinds, list) else []
    if others:
        return f"layers that are not full attention ({', '.join(others)}) keep part of the prompt or a state"
    window = _count(config, "sliding_window")
    longest = _count(config, "max_position_embeddings")
    short = window is not None and (longest is None or window < longest)
    # Older configs have no layer_types: a window counts unless use_sliding_window is false.
    if short and kinds is None and config.get("use_sliding_window", True):
        return f"a sliding window of {window} tokens: layers keep only the last tokens of a prompt"
    named = next((field for field in _RECURRENT if config.get(field)), "")
    return f"recurrent layers ({named}) keep a state that does not grow with the prompt" if named else ""


def _count(config: Mapping[str, Any], field: str) -> int | None:
    value = config.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
