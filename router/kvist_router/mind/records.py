"""One record per request: what was predicted for each replica, what was chosen, what happened.

Called by mind/mind.py; read by admin.py. A ring: the oldest record goes first.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from kvist_connector.protocol.engine import RequestRecord
from kvist_connector.protocol.tiers import Tier


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
    considered: list[Considered]
    attempts: list[str]
    beyond_plain: list[str] = msgspec.field(default_factory=list)  # what it used that engines may differ in
    last_chunk_key: str = ""  # hex; "" when the prompt has no full chunk, or more than one prompt
    tenant: str = ""
    elsewhere: dict[str, str] = {}  # replica that shadow policies would have taken, of those who disagree
    outcome: str = "running"
    error: str = ""
    ttft: float | None = None
    duration: float | None = None
    actual: Actual | None = None


class Records:
    """Ring of decision records by request id."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> None:
        """Keep a record; one of the same id (a retry) replaces the first attempt's."""
        self._records[record.id] = record
        while len(self._records) > self._capacity:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> DecisionRecord | None:
        """The record, or None when it is unknown or gone."""
        return self._records.get(request_id)

    def latest(self, limit: int) -> list[DecisionRecord]:
        """Newest first."""
        newest = reversed(self._records.values())
        return [record for _, record in zip(range(limit), newest, strict=False)]


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
