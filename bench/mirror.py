"""The router's index: memory of 64 replicas with 200,000 chunks each, and feed updates a second on one core.

    python -m bench.mirror [--replicas 64] [--keys 200000] [--check]

Every replica's feed is taken as it comes from the wire: frames are decoded, checked and applied. All keys
differ, as they do where nothing is shared, which costs most. Then deltas of one chunk each way (an engine
that is full evicts one for each that it stores) in frames of 64. Memory is the growth of this process.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from hashlib import blake2b
from pathlib import Path
from typing import Final

from bench import harness
from bench.openings import opening
from kvist_connector.protocol import feed
from kvist_connector.protocol.framing import FrameDecoder, encode
from kvist_connector.protocol.tiers import Tier
from kvist_router.memory import settle_memory
from kvist_router.mind.replica import Replica
from kvist_router.mind.shared import SharedKeys
from kvist_router.settings import IndexSettings, ReplicaSettings

PART: Final = 8192  # keys of a frame of the snapshot
DELTA: Final = 64
GOAL_GIGABYTES: Final = 2.5
GOAL_UPDATES: Final = 50_000.0


class Fed:
    """A replica, and its feed's end of the wire."""

    def __init__(self, number: int, shared: SharedKeys) -> None:
        self.replica = Replica(
            ReplicaSettings(name=f"r{number}", url="http://engine"), IndexSettings(), shared
        )
        self._decoder: FrameDecoder[feed.FeedMessage] = FrameDecoder(feed.FeedMessage)
        self._seed = number.to_bytes(4)
        self._sequence = 0

    def take(self, message: feed.FeedMessage) -> None:
        """As feed_reader.py: bytes in, replica changed."""
        for decoded in self._decoder.feed(encode(message)):
            self.replica.apply(decoded, 0.0)

    def snapshot(self, keys: int) -> None:
        """The opening, then all keys."""
        self.take(opening(self.replica.name, "m", bytes(32), block_tokens=16))
        for start in range(0, keys, PART):
            end = min(keys, start + PART)
            self.take(feed.Snapshot(self._next(), Tier.MEMORY, self.keys(start, end), end == keys))

    def delta(self, start: int, keys: int) -> feed.Delta:
        """The next `DELTA` chunks come, the oldest go."""
        added = self.keys(keys + start, keys + start + DELTA)
        return feed.Delta(self._next(), Tier.MEMORY, added, self.keys(start, start + DELTA))

    def keys(self, start: int, end: int) -> bytes:
        """Joined keys number `start` to `end` of this replica."""
        return b"".join(
            blake2b(number.to_bytes(8), digest_size=16, key=self._seed).digest()
            for number in range(start, end)
        )

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence


def run(options: harness.Options) -> harness.Result:
    """Memory and speed of the router's index."""
    replicas, keys = options.extra.replicas, options.extra.keys
    if options.quick:
        replicas, keys = 4, 50_000
    before, shared = _resident(), SharedKeys()
    fleet = [Fed(number, shared) for number in range(replicas)]
    for fed in fleet:
        fed.snapshot(keys)
    gc.collect()
    gigabytes = (_resident() - before) / 1e9
    settle_memory()
    rate = _updates(fleet, keys, options.rounds(60, 10))
    held = sum(len(fed.replica.mirror) for fed in fleet)
    rows = (
        ("chunks mirrored", f"{held:,}"),
        ("memory", f"{gigabytes:.2f} GB"),
        ("memory of a chunk", f"{gigabytes * 1e9 / held:.0f} B"),
        ("updates a second of one core", f"{rate:,.0f}"),
    )
    share = held / (64 * 200_000)
    goals = (
        harness.Goal("memory of the index", gigabytes, GOAL_GIGABYTES * share, unit=" GB"),
        harness.Goal("updates a second of one core", rate, GOAL_UPDATES, at_least=True),
    )
    headline = f"{replicas} replicas of {keys:,} chunks: {gigabytes:.2f} GB, {rate:,.0f} updates a second"
    table = harness.Table(f"{replicas} replicas, {keys:,} chunks each", ("what", "figure"), rows)
    return harness.Result(headline, (table,), {"gigabytes": gigabytes, "updates": rate}, goals)


def _updates(fleet: list[Fed], keys: int, rounds: int) -> float:
    """Chunks that came and went, by processor time: the machine may be busy with others."""
    spent, count = 0.0, 0
    for number in range(rounds):
        deltas = [fed.delta(number * DELTA, keys) for fed in fleet]
        began = time.process_time()
        for fed, delta in zip(fleet, deltas, strict=True):
            fed.take(delta)
        spent += time.process_time() - began
        count += 2 * DELTA * len(fleet)
    return count / spent


def _resident() -> int:
    """Bytes of this process in memory."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) * 1024


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, default=64, help="replicas (default: 64)")
    parser.add_argument("--keys", type=int, default=200_000, help="chunks of each (default: 200000)")


if __name__ == "__main__":
    sys.exit(harness.main("mirror", run, _arguments))
