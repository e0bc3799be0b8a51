"""The models of an engine, from its `GET /v1/models`. Pure; called by health.py and admin.py."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One name a client may ask for."""

    name: str
    longest: int | None  # context length in tokens; None when the engine does not say
    adapter: bool  # a LoRA adapter: its name is part of the keys


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _Listing(msgspec.Struct):
    data: list[_Card]


def read_models(body: bytes) -> dict[str, ServedModel]:
    """Models by name; raises msgspec.MsgspecError when the answer is not a model list."""
    try:
        listing = msgspec.json.decode(body, type=_Listing)
    except RecursionError as error:
        raise msgspec.ValidationError("nested too deeply") from error
    return {
        card.id: ServedModel(card.id, card.max_model_len, card.parent is not None) for card in listing.data
    }
