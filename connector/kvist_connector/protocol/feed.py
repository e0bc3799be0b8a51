"""Messages of the feed: `GET /v1/kvist/feed?reader=ID` on the agent's HTTP port.

A stream of frames (framing.py): Opening, Snapshot parts until `last`, then Deltas,
Loads, Records and States as they happen. `sequence` grows by one with every frame after
Opening; a gap, a new epoch or a frame that does not decode makes the reader connect anew
and take a new snapshot. A reader that is too slow is disconnected, never waited for.

Keys of tier GPU are prefixes at engine-block granularity (`keys.tail_keys`: the key at a
chunk's end is the chunk's own); all other tiers hold whole chunks.
"""

from __future__ import annotations

from kvist_connector.protocol.engine import EngineLoad, Message, RequestRecord

FEED_VERSION = 1
CONTENT_TYPE = "application/x-kvist-feed"


class Opening(Message, frozen=True):
    """First frame. `fingerprint` is b"" until an engine registered: a new epoch follows then."""

    version: int
    epoch: int  # changes when the agent restarts or its fingerprint changes
    replica: str
    fingerprint: bytes
    group: int
    model: str
    chunk_tokens: int
    block_tokens: int
    gpu_known: bool  # false: GPU residency is unknown, not empty
    draining: bool


class Snapshot(Message, frozen=True):
    """Part of the index: keys held in one tier."""

    sequence: int
    tier: int
    keys: bytes
    last: bool


class Delta(Message, frozen=True):
    """Changes of one tier: apply `removed`, then `added`."""

    sequence: int
    tier: int
    added: bytes
    removed: bytes


class TierSpeed(Message, frozen=True):
    """Measured price of a tier that the agent has, for planner.load_seconds."""

    tier: int
    latency_seconds: float
    bytes_per_second: float  # 0: the tier does not answer now, nothing is loaded from it


class Load(Message, frozen=True):
    """Every 50 ms while it changes, else every second."""

    sequence: int
    load: EngineLoad
    speeds: tuple[TierSpeed, ...]
    chunk_bytes: int  # of one chunk over all ranks
    engine_connected: bool


class Record(Message, frozen=True):
    """A request's prefill ended."""

    sequence: int
    record: RequestRecord


class State(Message, frozen=True):
    """`gpu_known` or `draining` changed; gpu_known false also empties the reader's GPU view."""

    sequence: int
    gpu_known: bool
    draining: bool


FeedMessage = Opening | Snapshot | Delta | Load | Record | State
