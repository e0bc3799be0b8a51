"""How busy the engine is, as the feed tells the routers. Torch-free, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvist_connector.engines.vllm.requests import RequestState
from kvist_connector.planner import PrefillModel
from kvist_connector.protocol.engine import EngineLoad

MIN_INTERVAL = 0.05  # seconds between reports of a load that goes on changing


@dataclass(frozen=True)
class KvSpace:
    """The engine's KV space in tokens."""

    total: int = 0
    used: int = 0


def engine_load(
    states: Iterable[RequestState],
    chunk_tokens: int,
    space: KvSpace,
    model: PrefillModel | None,
    accepted: dict[str, str],
) -> EngineLoad:
    """Counts over live requests; waiting ones without the tokens they are going to load."""
    waiting = running = waiting_tokens = running_tokens = decoding = 0
    for state in states:
        if state.finished:
            continue
        request = state.request
        if state.scheduled_at is None:
            waiting += 1
            waiting_tokens += max(1, request.num_prompt_tokens - state.hit_chunks() * chunk_tokens)
            continue
        running += 1
        left = request.num_prompt_tokens - request.num_computed_tokens
        if left > 0:
            running_tokens += left
        else:
            decoding += 1
    return EngineLoad(
        waiting_requests=waiting,
        running_requests=running,
        waiting_prefill_tokens=waiting_tokens,
        running_prefill_tokens=running_tokens,
        decode_sequences=decoding,
        kv_tokens_total=space.total,
        kv_tokens_used=space.used,
        prefill_seconds_per_token=model.linear if model else 0.0,
        prefill_seconds_per_token2=model.quadratic if model else 0.0,
        last_accepted=accepted,
    )


class LoadPacer:
    """Paces load messages: only what changed, not too often, and at once when the engine falls idle."""

    def __init__(self) -> None:
        self._sent: EngineLoad | None = None
        self._at = float("-inf")

    def wanted(self, now: float, idle: bool) -> bool:
        """Whether it is time to look at the load."""
        return idle or now - self._at >= MIN_INTERVAL

    def sent(self, load: EngineLoad, now: float) -> bool:
        """Marks the load as sent; False when it is the one sent before."""
        if load == self._sent:
            return False
        self._sent, self._at = load, now
        return True

    def reset(self) -> None:
        """A new connection knows nothing yet."""
        self._sent, self._at = None, float("-inf")
