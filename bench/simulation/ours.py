"""Kvist's router in the simulation: its own mirror, cost, pending prefixes and policies.

Called by bench/routing.py and bench/capacity73.py. Only the glue of mind/mind.py is repeated here:
what is asked of a replica for each decision, and what its reports change.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from random import Random

from bench.simulation.engine import Engine
from bench.simulation.trace import BLOCK_TOKENS, Request
from kvist_connector.protocol import feed
from kvist_connector.protocol.engine import EngineLoad
from kvist_connector.protocol.tiers import Tier
from kvist_router.mind.choice import Candidate, Policy
from kvist_router.mind.cost import prompt_cost
from kvist_router.mind.inflight import InFlight, InFlightMap
from kvist_router.mind.mind import PENDING_GRACE_SECONDS
from kvist_router.mind.replica import Chain, Replica
from kvist_router.settings import IndexSettings, ReplicaSettings
from kvist_router.tokens.keys import KeyMemo

CHUNK_BYTES = 64 * 2**20
FULL_PASS = 8192
PREFILL_SECONDS = (4.209989e-7 * FULL_PASS**2 + 1.518344e-2 * FULL_PASS + 16.50142) / 1000 / FULL_PASS


class Kvist:
    """Feeds of the engines' pools and loads are read just before each decision."""

    def __init__(self, engines: Many[Engine], seed: int, policy: Policy) -> None:
        self._engines, self._random, self._policy = engines, Random(seed), policy
        self._replicas = [_replica(f"engine-{number:02}") for number in range(len(engines))]
        self._numbers = {replica.name: number for number, replica in enumerate(self._replicas)}
        self._memo = KeyMemo(1024)
        self._in_flight = InFlightMap(10**6, 3600.0)
        self._ticked = 0.0
        self._told = [1] * len(engines)  # sequence numbers of the feeds

    def choose(self, request: Request, now: float) -> int:
        """As `LocalMind.decide`, and once a second `tick`."""
        if now - self._ticked >= 1.0:
            self._ticked = now
            for replica in self._replicas:
                replica.pending.expire(now)
        keys = [block.to_bytes(16) for block in request.blocks]
        candidates = []
        for number, replica in enumerate(self._replicas):
            self._read_feed(number, now)
            candidates.append(self._candidate(replica, request, Chain(b"", keys, b""), now))
        choice = self._policy.choose(candidates, self._random)
        number = self._numbers[choice.name]
        self._dispatch(request, self._replicas[number], candidates[number], keys, now)
        return number

    def _candidate(self, replica: Replica, request: Request, chain: Chain, now: float) -> Candidate:
        queue = replica.queue_seconds(now)
        space = max(0.0, replica.space_seconds(now, request.tokens) - queue)
        match = replica.match(chain, self._memo, now)
        cost = prompt_cost(match, request.tokens, BLOCK_TOKENS, BLOCK_TOKENS, replica.speeds, queue, space)
        return Candidate(replica.name, cost, replica.outstanding_tokens, replica.outstanding_requests)

    def _dispatch(
        self, request: Request, replica: Replica, chosen: Candidate, keys: list[bytes], now: float
    ) -> None:
        total, name = chosen.cost.total, str(request.number)
        computes = replica.computes(keys, now)
        replica.pending.add(computes, now + total, now + 2 * total + PENDING_GRACE_SECONDS, name)
        uncached = max(0, request.tokens - chosen.cost.reused)
        self._in_flight.begin(InFlight(name, replica, keys, computes, uncached, total, now))

    def first_token(self, request: Request, engine: int, now: float) -> None:
        """As the relay's `first_byte`."""
        entry = self._in_flight.get(str(request.number))
        assert entry is not None
        self._in_flight.first_byte(entry)
        if entry.uncached_tokens >= BLOCK_TOKENS:
            entry.replica.observed(entry.predicted_ttft, now - entry.decided)

    def ended(self, request: Request, engine: int, now: float) -> None:
        """As the relay's `ended`."""
        entry = self._in_flight.end(str(request.number))
        assert entry is not None
        entry.replica.held(now - entry.decided)

    def predicted(self, request: Request) -> int:
        """Tokens that the choice for a request in flight counted on."""
        entry = self._in_flight.get(str(request.number))
        return 0 if entry is None else request.tokens - entry.uncached_tokens

    def _read_feed(self, number: int, now: float) -> None:
        engine, replica = self._engines[number], self._replicas[number]
        for on_host, added, block in engine.pool.changes:
            key, tier = block.to_bytes(16), Tier.MEMORY if on_host else Tier.GPU
            gone = b"" if added else key
            replica.pending.committed(replica.mirror.delta(feed.Delta(0, tier, key if added else b"", gone)))
        engine.pool.changes.clear()
        waiting, running = engine.prefill_tokens
        spec, used = engine.spec, engine.pool.active * BLOCK_TOKENS
        load = EngineLoad(
            waiting_prefill_tokens=waiting, running_prefill_tokens=running,
            kv_tokens_total=spec.blocks * BLOCK_TOKENS, kv_tokens_used=used,
            prefill_seconds_per_token=PREFILL_SECONDS,
        )  # fmt: skip
        speeds: tuple[feed.TierSpeed, ...] = ()
        if spec.host_blocks:
            speeds = (feed.TierSpeed(Tier.MEMORY, 0.0, CHUNK_BYTES / spec.host_seconds),)
        self._told[number] += 1
        replica.apply(feed.Load(self._told[number], load, speeds, CHUNK_BYTES, True), now)


def _replica(name: str) -> Replica:
    replica = Replica(ReplicaSettings(name=name, url=f"http://{name}"), IndexSettings())
    opening = feed.Opening(
        version=feed.FEED_VERSION, epoch=1, replica=name, fingerprint=bytes(32), group=0, model="model",
        chunk_tokens=BLOCK_TOKENS, block_tokens=BLOCK_TOKENS, gpu_known=True, draining=False,
    )  # fmt: skip
    replica.apply(opening, 0.0)
    replica.apply(feed.Snapshot(1, Tier.GPU, b"", True), 0.0)
    return replica
