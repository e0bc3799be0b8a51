"""One record per request: what was predicted for each replica, what was chosen, what happened.

Called by mind/mind.py; read by admin.py. A ring: the oldest record goes first. Of nearly all records nobody
reads what was predicted for each replica, so that is written down when somebody does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvist_connector.protocol.engine import RequestRecord
from kvist_connector.protocol.tiers import Tier
from kvist_router.mind.choice import Candidate, delays, work


class Considered(msgspec.Struct, frozen=True, gc=False):
    """One replica's predicted cost: seconds of each part, and tokens reused."""

    replica: str
    total: float
    queue: float
    load: float
    pending: float
    recompute: float
    reused_tokens: int
    space: float = 0.0
    delays: float = 0.0  # seconds that other requests lose together
    work: float = 0.0  # what the computing costs whoever is there, in seconds


class Actual(msgspec.Struct, frozen=True):
    """What the connector reported."""

    replica: str
    prompt_tokens: int
    hit_tokens: dict[str, int]  # by tier
    lookup_seconds: float
    wait_seconds: float
    load_seconds: float
    prefill_seconds: float
    failed_load: bool

    @property
    def reused_tokens(self) -> int:
        """Tokens that were not computed."""
        return sum(self.hit_tokens.values())


class DecisionRecord(msgspec.Struct):
    """Times are seconds; `time` is Unix time."""

    id: str
    time: float
    path: str
    model: str
    policy: str
    replica: str
    reason: str
    prompt_tokens: int
    predicted_tokens: int
    predicted_ttft: float
    tokens_from: str  # local, remote, ids, unknown
    streamed: bool
    attempts: list[str]
    considered: list[Considered] = []
    beyond_plain: list[str] = msgspec.field(default_factory=list)  # what it used that engines may differ in
    last_chunk_key: str = ""  # hex; "" when the prompt has no full chunk, or more than one prompt
    tenant: str = ""
    elsewhere: dict[str, str] = {}  # replica that shadow policies would have taken, of those who disagree
    outcome: str = "running"
    error: str = ""
    ttft: float | None = None
    duration: float | None = None
    actual: Actual | None = None


class _Kept(NamedTuple):
    """A record, and what its `considered` comes from."""

    record: DecisionRecord
    candidates: Sequence[Candidate]
    standstill: float

    def whole(self) -> DecisionRecord:
        """The record with all its parts."""
        if not self.record.considered:
            self.record.considered = considered(self.candidates, self.standstill)
        return self.record


class Records:
    """Ring of decision records by request id."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord, candidates: Sequence[Candidate], standstill: float) -> None:
        """Keep a record; one of the same id (a retry) replaces the first attempt's."""
        self._records[record.id] = _Kept(record, candidates, standstill)
        while len(self._records) > self._capacity:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> DecisionRecord | None:
        """The record, or None when it is unknown or gone."""
        kept = self._records.get(request_id)
        return None if kept is None else kept.whole()

    def running(self, request_id: str) -> DecisionRecord | None:
        """The same without what was `considered`, for who only writes down how the request fares."""
        kept = self._records.get(request_id)
        return None if kept is None else kept.record

    def latest(self, limit: int) -> list[DecisionRecord]:
        """Newest first."""
        newest = reversed(self._records.values())
        return [kept.whole() for _, kept in zip(range(limit), newest, strict=False)]


def considered(candidates: Sequence[Candidate], standstill: float) -> list[Considered]:
    """The predicted costs in words."""
    mean = sum(item.lately for item in candidates) / len(candidates) if candidates else 0.0
    return [
        Considered(
            item.name,
            cost.total,
            cost.queue,
            cost.load,
            cost.pending,
            cost.recompute,
            cost.reused,
            cost.space,
            delays(item, standstill),
            work(item, mean),
        )
        for item in candidates
        for cost in [item.cost]
    ]


def actual(replica: str, record: RequestRecord) -> Actual:
    """The connector's record in words."""
    known = {int(tier): tier.label for tier in Tier}
    return Actual(
        replica=replica,
        prompt_tokens=record.prompt_tokens,
        hit_tokens={known.get(tier, str(tier)): tokens for tier, tokens in record.hit_tokens.items()},
        lookup_seconds=record.lookup_seconds,
        wait_seconds=record.wait_seconds,
        load_seconds=record.load_seconds,
        prefill_seconds=record.prefill_seconds,
        failed_load=record.failed_load,
    )
