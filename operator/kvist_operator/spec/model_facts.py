"""What a model's config.json says about the size of its KV. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvist_connector.kv_size import kv_size


@dataclass(frozen=True)
class ModelFacts:
    """Figures of one model; None where its config does not say."""

    kv_bytes_per_token: int | None
    max_tokens: int | None


def model_facts(config: Mapping[str, Any], dtype: str = "auto") -> ModelFacts:
    """From config.json as parsed; `dtype` is engine.dtype."""
    size = kv_size(config, dtype)
    return ModelFacts(kv_bytes_per_token=size.bytes_per_token, max_tokens=size.max_tokens)
