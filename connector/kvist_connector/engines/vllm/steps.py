"""Steps that have been planned and not yet reported, and the record of a request. Torch-free.

Several are under way at once under async scheduling; each is found again by its number.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvist_connector.engines.vllm.requests import RequestState, router_request_id
from kvist_connector.protocol.engine import AnswerRecord, RequestRecord

MAX_STEPS = 64  # unreported steps that are remembered


@dataclass
class StepRecord:
    """A step that has been planned and not yet reported."""

    step: int
    began: float
    loads: dict[str, RequestState] = field(default_factory=dict)
    tables: dict[str, tuple[int, ...]] = field(default_factory=dict)
    prefilled: list[RequestState] = field(default_factory=list)
    members: list[RequestState] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    def touched(self, invalid: set[int]) -> set[str]:
        """Requests whose pages a failed load left wrong."""
        return {request for request, table in self.tables.items() if not invalid.isdisjoint(table)}

    def spoil(self, touched: set[str]) -> None:
        """What was computed from wrong pages does not count."""
        self.prefilled = [state for state in self.prefilled if state.id not in touched]
        self.spans = []


class StepRecords:
    """By step number, oldest first, bounded."""

    def __init__(self) -> None:
        self._records: OrderedDict[int, StepRecord] = OrderedDict()

    def add(self, record: StepRecord) -> list[StepRecord]:
        """Remember; returns those that are given up for it."""
        self._records[record.step] = record
        return [self._records.popitem(last=False)[1] for _ in range(len(self._records) - MAX_STEPS)]

    def take(self, step: int) -> StepRecord | None:
        """The record of a reported step."""
        return self._records.pop(step, None)

    def take_lost(self, reported: int) -> list[StepRecord]:
        """Steps so long before the reported one that their report will not come."""
        lost = [step for step in self._records if step < reported - MAX_STEPS]
        return [self._records.pop(step) for step in lost]


def request_record(state: RequestState, now: float, chunk_tokens: int) -> RequestRecord:
    """What the router learns of a request whose prompt is computed."""
    request = state.request
    scheduled = state.scheduled_at if state.scheduled_at is not None else now
    return RequestRecord(
        request=router_request_id(state.id),
        prompt_tokens=request.num_prompt_tokens,
        last_chunk_key=_last_chunk_key(state, chunk_tokens),
        hit_tokens={int(tier): tokens for tier, tokens in state.hit_tokens.items()},
        arrived=state.arrived_unix,
        lookup_seconds=state.lookup_seconds,
        wait_seconds=scheduled - state.arrived,
        load_seconds=state.load_seconds,
        prefill_seconds=now - scheduled,
        failed_load=state.failed_load,
    )


def answer_record(state: RequestState, chunk_tokens: int) -> AnswerRecord | None:
    """What the agent learns of a request that has ended; None without a whole chunk or a computed prompt."""
    key = _last_chunk_key(state, chunk_tokens)
    if not key or not state.recorded:
        return None
    return AnswerRecord(key, state.request.num_output_tokens)


def _last_chunk_key(state: RequestState, chunk_tokens: int) -> bytes:
    full = state.request.num_prompt_tokens // chunk_tokens
    return state.keys[full - 1] if 0 < full <= len(state.keys) else b""
