"""Whether a worker's layout may use this agent, and as what: decisions without side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import msgspec
from blake3 import blake3

from kvist_connector.agent.arena_file import describe_minimum
from kvist_connector.arena.geometry import slots_that_fit
from kvist_connector.protocol.engine import Geometry, Layout

FINGERPRINT_BYTES: Final = 32
_LOSSY: Final = "lossy_tiers"  # in a layout's description


class Step(Enum):
    """What registering leads to."""

    KEEP = auto()  # same layout: go on with what is there
    FORMAT = auto()  # first or new layout: the memory tier starts empty
    REFUSE = auto()


@dataclass(frozen=True)
class Verdict:
    """The decision and, for a refusal, its text for the user."""

    step: Step
    reason: str = ""


def geometry_of(layout: Layout, memory: int) -> Geometry:
    """The arena that a layout makes of `memory` bytes; zero slots when not one fits."""
    per_rank = layout.layers * layout.layer_bytes
    return Geometry(
        slots=slots_that_fit(memory, layout.ranks, per_rank) if memory else 0,
        ranks=layout.ranks,
        layers=layout.layers,
        layer_bytes=layout.layer_bytes,
        blocks=layout.blocks,
        chunk_tokens=layout.chunk_tokens,
    )


def judge(current: Layout | None, offered: Layout, users: int, memory: int) -> Verdict:
    """`users`: living or connected workers of `current`; `memory`: bytes of the arena, 0 without one."""
    problem = _malformed(offered)
    if problem:
        return Verdict(Step.REFUSE, problem)
    geometry = geometry_of(offered, memory)
    if memory and not geometry.slots:
        return Verdict(Step.REFUSE, describe_minimum(geometry, memory))
    if current is None:
        return Verdict(Step.FORMAT)
    if current.fingerprint == offered.fingerprint:
        difference = _difference(current, offered)
        if difference and users:
            return Verdict(Step.REFUSE, f"ranks disagree about the KV layout: {difference}")
        return Verdict(Step.FORMAT if difference else Step.KEEP)
    if users:
        return Verdict(
            Step.REFUSE,
            f"this agent serves {current.model} for {users} living worker(s), and {offered.model} has "
            f"another fingerprint ({_difference(current, offered) or 'model state'}): use one agent per "
            "engine, or stop the other engine first",
        )
    return Verdict(Step.FORMAT)


def announced(layout: Layout, lossy: bool) -> Layout:
    """The layout as this agent knows and announces it.

    Where a tier rounds, KV differs for equal tokens, and so does what is computed after it was loaded: it
    is of another fingerprint, so that nobody who wants exact KV finds any of it.
    """
    if not lossy:
        return layout
    fingerprint = blake3(b"kvist fp8" + layout.fingerprint).digest(FINGERPRINT_BYTES)
    description = layout.description | {_LOSSY: "fp8"}
    return msgspec.structs.replace(layout, fingerprint=fingerprint, description=description)


def is_lossy(layout: Layout) -> bool:
    """Whether it was announced by an agent one of whose tiers rounds."""
    return _LOSSY in layout.description


def unroundable(layout: Layout, lossy: Sequence[str]) -> str:
    """Why chunks of this layout cannot be rounded as these settings want it; empty when they can."""
    if not lossy or layout.values.known:
        return ""
    problem = layout.values.problem or "the engine's connector does not say what its KV is"
    return f"{lossy[0]}: 'fp8' is not possible: {problem}: use zstd there"


def _malformed(layout: Layout) -> str:
    if layout.group != 0:
        return f"KV group {layout.group}: only models with one KV cache group are supported"
    if not 0 < len(layout.fingerprint) <= 64:
        return f"fingerprint has {len(layout.fingerprint)} bytes, expected 1 to 64"
    for name in ("ranks", "layers", "layer_bytes", "blocks", "chunk_tokens", "block_tokens"):
        if getattr(layout, name) <= 0:
            return f"layout field {name} is {getattr(layout, name)}, expected a positive number"
    if layout.chunk_tokens % layout.block_tokens:
        return f"chunk of {layout.chunk_tokens} tokens is no multiple of the block of {layout.block_tokens}"
    if layout.layer_bytes % layout.blocks:
        return f"layer_bytes {layout.layer_bytes} is no multiple of its {layout.blocks} blocks"
    return ""


def _difference(one: Layout, other: Layout) -> str:
    names = ("ranks", "layers", "layer_bytes", "blocks", "chunk_tokens", "block_tokens", "model")
    parts = [
        f"{name} {getattr(one, name)} against {getattr(other, name)}"
        for name in names
        if getattr(one, name) != getattr(other, name)
    ]
    if not parts and one.fingerprint != other.fingerprint:
        keys = sorted(set(one.description) | set(other.description))
        parts = [
            f"{key} {one.description.get(key)} against {other.description.get(key)}"
            for key in keys
            if one.description.get(key) != other.description.get(key)
        ]
    return ", ".join(parts)
