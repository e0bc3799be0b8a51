"""Figures of a replay: pure aggregation of what was measured, turn by turn.

Called by the demo after each replay and for the JSON file. Hits come as three figures:
requests (at least one chunk's worth of tokens reused), tokens (reused / prompt) and seconds
(estimated: prefill not computed, less the time loading took, as a share of all prefill).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvist_connector.keys import CHUNK_TOKENS
from kvist_connector.planner import PrefillModel

STORED_TIERS = ("memory", "disk")


@dataclass(frozen=True)
class TurnResult:
    """One turn in one mode. `hits`: reused tokens by tier label, the engine's own KV being "gpu"."""

    turn: str
    replica: str
    warm: bool
    prompt_tokens: int
    completion_tokens: int
    predicted_tokens: int | None
    hits: Mapping[str, int]
    ttft: float
    gaps: tuple[float, ...]
    load_seconds: float = 0.0

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.hits.values())


@dataclass(frozen=True)
class Traffic:
    """Bytes that moved, by tier label."""

    stored: Mapping[str, int] = field(default_factory=dict)
    loaded: Mapping[str, int] = field(default_factory=dict)

    def since(self, before: Traffic) -> Traffic:
        """What moved after `before` was read."""
        return Traffic(_less(self.stored, before.stored), _less(self.loaded, before.loaded))

    def plus(self, other: Traffic) -> Traffic:
        """Of both together."""
        return Traffic(_more(self.stored, other.stored), _more(self.loaded, other.loaded))


@dataclass(frozen=True)
class Replay:
    """All turns of one mode; `seconds` from the first request to the last token."""

    mode: str
    turns: tuple[TurnResult, ...]
    seconds: float
    traffic: Traffic = Traffic()


def prefill_model(replays: Iterable[Replay]) -> PrefillModel:
    """Seconds per computed token, from turns that computed enough for the rest not to matter."""
    rates = [
        turn.ttft / computed
        for replay in replays
        for turn in replay.turns
        if (computed := turn.prompt_tokens - turn.hit_tokens) >= CHUNK_TOKENS
    ]
    return PrefillModel(linear=statistics.median(rates) if rates else 0.0)


def hit_rate(turns: Sequence[TurnResult], prefill: PrefillModel) -> dict[str, float]:
    """The three hit rates, each 0..1."""
    prompt = sum(turn.prompt_tokens for turn in turns)
    total = sum(prefill.seconds(0, turn.prompt_tokens) for turn in turns)
    return {
        "requests": _share(sum(turn.hit_tokens >= CHUNK_TOKENS for turn in turns), len(turns)),
        "tokens": _share(sum(turn.hit_tokens for turn in turns), prompt),
        "seconds": _share(saved_seconds(turns, prefill), total),
    }


def saved_seconds(turns: Sequence[TurnResult], prefill: PrefillModel) -> float:
    """Estimated: prefill that was not computed, less what loading cost."""
    return sum(prefill.seconds(0, turn.hit_tokens) - turn.load_seconds for turn in turns)


def summary(replay: Replay, prefill: PrefillModel) -> dict[str, Any]:
    """One mode's part of the JSON file; the same keys in every mode."""
    turns = replay.turns
    return {
        "hit_rate": hit_rate(turns, prefill),
        "saved_seconds": saved_seconds(turns, prefill),
        "ttft_ms": {
            "cold": spread([turn.ttft for turn in turns if not turn.warm]),
            "warm": spread([turn.ttft for turn in turns if turn.warm]),
        },
        "itl_ms": {"p50": _milliseconds([gap for turn in turns for gap in turn.gaps], 0.5)},
        "throughput_tok_s": _share(
            sum(turn.prompt_tokens + turn.completion_tokens for turn in turns), replay.seconds
        ),
        "bytes": {"stored": _by_tier(replay.traffic.stored), "loaded": _by_tier(replay.traffic.loaded)},
        "seconds": replay.seconds,
    }


def spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50 and p95 in milliseconds."""
    return {"p50": _milliseconds(seconds, 0.5), "p95": _milliseconds(seconds, 0.95)}


def routes(replay: Replay) -> list[dict[str, Any]]:
    """Where each turn went, and what was promised and kept."""
    return [
        {
            "turn": turn.turn,
            "replica": turn.replica,
            "predicted_tokens": turn.predicted_tokens,
            "actual_tokens": turn.hit_tokens,
        }
        for turn in replay.turns
    ]


def distinct_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """KV tokens that the prompts need together: positions with equal tokens before them count once."""
    total = 0
    previous: Sequence[int] = ()
    for prompt in sorted(list(prompt) for prompt in prompts):
        total += len(prompt) - _common(previous, prompt)
        previous = prompt
    return total


def shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Length of what all prompts begin with."""
    return min((_common(prompts[0], prompt) for prompt in prompts), default=0)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; of one value that value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _milliseconds(seconds: Sequence[float], share: float) -> float | None:
    return percentile(seconds, share) * 1000 if seconds else None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _by_tier(amounts: Mapping[str, int]) -> dict[str, int]:
    return {tier: amounts.get(tier, 0) for tier in STORED_TIERS}


def _less(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {tier: amount - before.get(tier, 0) for tier, amount in after.items()}


def _more(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {tier: one.get(tier, 0) + other.get(tier, 0) for tier in {*one, *other}}
