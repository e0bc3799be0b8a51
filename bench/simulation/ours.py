"""Kvist's router in the simulation: its own mirror, cost, pending prefixes and policies.

Called by bench/routing.py and bench/capacity73.py. Only the glue of mind/mind.py is repeated here:
what is asked of a replica for each decision, and what its reports change.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from random import Random

from bench.simulation.engine import Engine, EngineSpec
from bench.simulation.feeds import Feeds, Reader, Told
from bench.simulation.trace import BLOCK_TOKENS, Request
from bench.simulation.wires import Teller, Wire
from kvist_connector.protocol import feed
from kvist_connector.protocol.tiers import Tier
from kvist_router.mind.choice import Candidate, Policy
from kvist_router.mind.inflight import InFlight, InFlightMap
from kvist_router.mind.mind import PENDING_GRACE_SECONDS
from kvist_router.mind.neighbours.known import Known
from kvist_router.mind.pricing import candidate
from kvist_router.mind.replica import Replica
from kvist_router.settings import IndexSettings, ReplicaSettings
from kvist_router.tokens.keys import Chain, KeyMemo, Prompt

CHUNK_BYTES = 64 * 2**20


class Kvist:
    """One router. Feeds, and what other routers tell, are read just before each decision.

    `unheard`: routers that choose too and tell it nothing.
    """

    def __init__(
        self, engines: Many[Engine], seed: int, policy: Policy, reader: Reader | None = None, unheard: int = 0
    ) -> None:
        self._spec, self._random, self._policy = engines[0].spec, Random(seed), policy
        self._reader = reader or Feeds(engines).reader()
        self._replicas = [_replica(f"engine-{number:02}") for number in range(len(engines))]
        self._numbers = {replica.name: number for number, replica in enumerate(self._replicas)}
        self._memo = KeyMemo(1024)
        self._in_flight = InFlightMap(10**6, 3600.0)
        self._in_flight.watcher = self._teller = Teller()
        self._unheard, self._heard = unheard, list[Wire]()
        self._ticked = 0.0
        self._told = [1] * len(engines)  # sequence numbers of the feeds

    def choose(self, request: Request, now: float) -> int:
        """As `LocalMind.decide`, and once a second `tick`."""
        if now - self._ticked >= 1.0:
            self._ticked = now
            for replica in self._replicas:
                replica.pending.expire(now)
        self._teller.now = now
        for number, told in enumerate(self._reader.read(now)):
            self._take(number, told)
        for wire in self._heard:
            wire.deliver(now)
        keys = [block.to_bytes(16) for block in request.blocks]
        chains = [Chain(b"", keys, request.tokens, Prompt(()), b"")]
        candidates = [
            candidate(replica, chains, request.tokens, self._memo, now, self._policy.feeds)
            for replica in self._replicas
        ]
        prefix = keys[0] if keys else b""
        choice = self._policy.choose(candidates, self._random, prefix, self._unheard)
        number = self._numbers[choice.name]
        self._dispatch(request, self._replicas[number], candidates[number], keys, now)
        return number

    def _dispatch(
        self, request: Request, replica: Replica, chosen: Candidate, keys: list[bytes], now: float
    ) -> None:
        total, name = chosen.cost.total, str(request.number)
        computes = replica.computes(keys, now)
        replica.pending.add(computes, now + total, now + 2 * total + PENDING_GRACE_SECONDS, name)
        uncached = max(0, request.tokens - chosen.cost.reused)
        entry = InFlight(name, replica, keys, computes, uncached, total, now, chosen.cost.space > 0)
        self._in_flight.begin(entry)

    def first_token(self, request: Request, engine: int, now: float) -> None:
        """As the relay's `first_byte`."""
        entry = self._in_flight.get(str(request.number))
        assert entry is not None
        self._teller.now = now
        self._in_flight.first_byte(entry, now)
        entry.replica.approximate.add(entry.keys)
        if entry.uncached_tokens >= BLOCK_TOKENS and not entry.waits_for_space:
            entry.replica.observed(entry.predicted_ttft, now - entry.decided)

    def ended(self, request: Request, engine: int, now: float) -> None:
        """As the relay's `ended`."""
        self._teller.now = now
        entry = self._in_flight.end(str(request.number))
        assert entry is not None
        assert entry.answering_since is not None
        entry.replica.held(now - entry.answering_since)

    def hear(self, others: Many[Kvist], lag: float) -> None:
        """Be told from now on what the others send, `lag` seconds late."""
        for number, other in enumerate(others):
            known = Known(f"router-{number}", {item.name: item for item in self._replicas}, 10**6)
            self._heard.append(Wire(known, lag))
            other._teller.wires.append(self._heard[-1])

    def predicted(self, request: Request) -> int:
        """Tokens that the choice for a request in flight counted on."""
        entry = self._in_flight.get(str(request.number))
        return 0 if entry is None else request.tokens - entry.uncached_tokens

    def _take(self, number: int, told: Many[Told]) -> None:
        replica = self._replicas[number]
        last = {(on_host, block): added for one in told for on_host, added, block in one.changes}
        for tier in (Tier.GPU, Tier.MEMORY) if last else ():
            mine = [(block.to_bytes(16), there) for (on_host, block), there in last.items()
                    if on_host == (tier is Tier.MEMORY)]  # fmt: skip
            added = b"".join(key for key, there in mine if there)
            gone = b"".join(key for key, there in mine if not there)
            replica.pending.committed(replica.mirror.delta(feed.Delta(0, tier, added, gone)))
        if told:
            self._told[number] += 1
            speeds = _speeds(self._spec)
            message = feed.Load(self._told[number], told[-1].load, speeds, CHUNK_BYTES, True)
            replica.apply(message, told[-1].at)


@dataclass(frozen=True)
class Lags:
    """Seconds until routers know: from feeds, and from each other (None: they tell each other nothing)."""

    feed: float = 0.0
    told: float | None = None


class Routers:
    """Several behind a balancer: each reads all feeds, and what the others tell."""

    def __init__(
        self, engines: Many[Engine], seed: int, policy: Callable[[], Policy], count: int, lags: Lags
    ) -> None:
        self._random, feeds = Random(seed), Feeds(engines)
        unheard = count - 1 if lags.told is None else 0
        self._all = [
            Kvist(engines, seed + 1 + n, policy(), feeds.reader(lags.feed), unheard) for n in range(count)
        ]
        for router in self._all if lags.told is not None else ():
            router.hear([other for other in self._all if other is not router], lags.told or 0.0)
        self._of: dict[int, Kvist] = {}

    def choose(self, request: Request, now: float) -> int:
        """By whichever router the balancer takes."""
        router = self._of[request.number] = self._random.choice(self._all)
        return router.choose(request, now)

    def first_token(self, request: Request, engine: int, now: float) -> None:
        """Told to the router that chose."""
        self._of[request.number].first_token(request, engine, now)

    def ended(self, request: Request, engine: int, now: float) -> None:
        """Told to the router that chose."""
        self._of.pop(request.number).ended(request, engine, now)


def _speeds(spec: EngineSpec) -> tuple[feed.TierSpeed, ...]:
    if not spec.host_blocks:
        return ()
    return (feed.TierSpeed(Tier.MEMORY, 0.0, CHUNK_BYTES / spec.host_seconds),)


def _replica(name: str) -> Replica:
    replica = Replica(ReplicaSettings(name=name, url=f"http://{name}"), IndexSettings())
    opening = feed.Opening(
        version=feed.FEED_VERSION, epoch=1, replica=name, fingerprint=bytes(32), group=0, model="model",
        chunk_tokens=BLOCK_TOKENS, block_tokens=BLOCK_TOKENS, gpu_known=True, draining=False,
    )  # fmt: skip
    replica.apply(opening, 0.0)
    replica.apply(feed.Snapshot(1, Tier.GPU, b"", True), 0.0)
    return replica
