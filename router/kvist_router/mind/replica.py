"""State of one replica, as the mind sees it: health, models, index, load, work sent and not done.

Called by mind/mind.py (decisions), feed_reader.py and health.py (updates); all on one loop.
The mirror is believed while its feed is live and `stale_seconds` after; then, and for a GPU whose
residency is unknown, the router's own dispatch history (the approximate index) stands in, as it
does for an engine without agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from kvist_connector.keys import CHUNK_TOKENS
from kvist_connector.planner import PrefillModel, TierPrice
from kvist_connector.protocol import feed
from kvist_connector.protocol.engine import EngineLoad, RequestRecord
from kvist_connector.protocol.tiers import Tier
from kvist_router.errors import FeedError
from kvist_router.mind import feed_limits
from kvist_router.mind.breaker import Breaker
from kvist_router.mind.cost import PRIOR_CHUNK_BYTES, PRIOR_PRICES, Match, Speeds, corrected
from kvist_router.mind.lately import Lately
from kvist_router.mind.mirror import NO_HIT, ApproximateIndex, Hit, Mirror
from kvist_router.mind.models import ServedModel
from kvist_router.mind.pending import Pending
from kvist_router.mind.prefix_cache import PrefixCache
from kvist_router.mind.shared import SharedKeys
from kvist_router.mind.trust import Trust
from kvist_router.settings import IndexSettings, ReplicaSettings
from kvist_router.tokens.keys import Chain, KeyMemo

BLOCK_TOKENS = 16  # of an engine that did not say
PENDING_KEYS = 65_536
HELD_WEIGHT = 0.1
PRIOR_HELD_SECONDS = 10.0  # until a request has ended
LOAD_SECONDS = 3.0  # a load report older than this is not used
_log = logging.getLogger(__name__)
_KNOWN_TIERS = frozenset(int(tier) for tier in Tier)


Identity = tuple[bytes, int, int]  # fingerprint, KV group, tokens of a chunk: what keys depend on


class Busy(msgspec.Struct, frozen=True, gc=False):
    """How much there is to do at a replica."""

    prefill_tokens: float  # to be computed before a new request
    waiting: int  # requests before their first token, whoever sent them
    decoding: int  # requests after it
    space_total: int = 0  # tokens of KV space; 0: not known
    space_free: int = 0
    space_rate: float = 0.0  # seconds until one token of it is given back; 0.0: not known
    kept_rate: float = 0.0  # the same with a prior until it is known

    @property
    def crowded(self) -> float:
        """Share of the KV space that is in use or wanted; 0.0 when not known."""
        if not self.space_total:
            return 0.0
        return min(1.0, 1 - (self.space_free - self.prefill_tokens) / self.space_total)

    def space_seconds(self, tokens: int, queue: float = 0.0) -> float:
        """Until the engine's KV space has room for `tokens` behind those that wait there, beyond `queue`."""
        if not self.space_total:
            return 0.0
        missing = self.prefill_tokens + tokens - self.space_free
        beyond = missing * self.space_rate - queue
        return beyond if beyond > 0 else 0.0


class Elsewhere:
    """What other routers sent to a replica and have told (neighbours/)."""

    def __init__(self) -> None:
        self.tokens = self.prefills = self.requests = 0

    def add(self, tokens: int, prefills: int, requests: int) -> None:
        """A request was sent, was prefilled or has ended."""
        self.tokens += tokens
        self.prefills += prefills
        self.requests += requests


class Replica:
    """One engine with its view. Public attributes are read by the admin API and metrics."""

    def __init__(
        self, settings: ReplicaSettings, index: IndexSettings, shared: SharedKeys | None = None
    ) -> None:
        self.settings = settings
        self.name, self.url, self.agent = settings.label, settings.url, settings.agent
        self.healthy = False
        self.problem = "not checked yet"
        self.listed_ready = True  # as discovery has it
        self.terminating = False
        self.models: dict[str, ServedModel] = {}
        self.starts = 0  # how often the engine came up
        self.prefix_cache: PrefixCache | None = None  # what an engine without agent says of its own
        self.mirror = Mirror(index.max_keys, shared)
        self.approximate = ApproximateIndex(index.unmanaged_kv_tokens // CHUNK_TOKENS)
        self.pending = Pending(PENDING_KEYS)
        self.feed_live = False
        self.feed_problem = "not connected yet" if settings.agent else "no agent"
        self.feed_breaks = 0
        self.gpu_doubted = False
        self.load = EngineLoad()
        self.engine_connected = False
        self.breaker = Breaker()
        self.drain_news = asyncio.Event()  # the agent should hear from us (drain.py)
        self.behind = False  # its agent does not know yet all that is retired (controls/spread.py)
        self.held_seconds = 0.0  # how long a request has KV space, moving mean; 0.0 until one has ended
        self.outstanding_tokens = 0
        self.outstanding_requests = 0
        self.outstanding_prefills = 0  # of these, those whose prefill is not over
        self.elsewhere = Elsewhere()
        self.lately = Lately()
        self.trust = Trust()
        self.chunk_tokens = CHUNK_TOKENS
        self.block_tokens = BLOCK_TOKENS  # reuse happens in these
        self.measured: PrefillModel | None = None
        self.speeds = Speeds(measured=False)
        self._identity: Identity | None = None
        self._stale_seconds = index.stale_seconds
        self._feed_lost = float("-inf")
        self._load_at = float("-inf")
        self._price_problem = ""

    @property
    def draining(self) -> bool:
        """Whether new requests should go elsewhere."""
        return self.terminating or self.mirror.draining

    @property
    def serves(self) -> bool:
        """Whether requests can go there, if need be."""
        return self.healthy and self.listed_ready and not self.behind

    @property
    def takes(self) -> bool:
        """Whether requests should go there: it serves, and does not drain."""
        return (
            self.healthy
            and self.listed_ready
            and not self.behind
            and not self.terminating
            and not self.mirror.draining
        )

    def listed(self, ready: bool, terminating: bool) -> None:
        """What discovery says of it now."""
        self.listed_ready, self.terminating = ready, terminating

    def identity(self, model: str) -> Identity:
        """The feed's, or one of our own for an engine that has none."""
        return self._identity or (f"unmanaged:{model}".encode(), 0, self.chunk_tokens)

    @property
    def fingerprinted(self) -> bool:
        """Whether the feed named a fingerprint: an engine has registered with the agent."""
        return self._identity is not None

    def mirrored(self, now: float) -> bool:
        """Whether the mirror is believed; otherwise the view is unknown, not empty."""
        if self._identity is None or not self.mirror.complete:
            return False
        return self.feed_live or now - self._feed_lost <= self._stale_seconds

    def match(self, chain: Chain, memo: KeyMemo, now: float, feeds: bool = True) -> Match:
        """What this replica would reuse of a prompt; without `feeds` by own dispatches alone."""
        keys, mirrored = chain.keys, feeds and self.mirrored(now)
        hit = self.mirror.hit(keys) if mirrored else NO_HIT
        if mirrored and self.mirror.gpu_known and not self.gpu_doubted:
            count, chunk, block = hit.gpu_chunks, self.chunk_tokens, self.block_tokens
            gpu = count * chunk
            gpu += block * memo.leading_blocks(chain, count, chunk, block, self.mirror.gpu_has)
        else:  # unknown is not empty: what was sent there is probably on the GPU still
            hit = Hit(self.approximate.hit(keys).gpu_chunks, hit.stored)
            gpu = hit.gpu_chunks * self.chunk_tokens
        if mirrored and self.trust.doubted:
            hit, gpu = self._believed(hit, gpu)
        if not self.pending.entries:
            return Match(hit, gpu)
        count, ready = self.pending.run(keys, hit.chunks, now)
        return Match(hit, gpu, count, ready - now)

    def _believed(self, hit: Hit, gpu: int) -> tuple[Hit, int]:
        """The part of a hit that is counted with."""
        share, block = self.trust.believed, self.block_tokens
        stored = hit.stored[: int(len(hit.stored) * share)]
        return Hit(int(hit.gpu_chunks * share), stored), int(gpu * share) // block * block

    def busy(self, now: float) -> Busy:
        """What is done here and waits, as far as it is known.

        Prefill is ours, what other routers told, and the rest by the engine's report. The engine counts whole
        prompts where it cannot know yet what it has of them; of ours we do know. By Little's law `used`
        tokens of KV space that each stay `held_seconds` make way at used / held_seconds a second.
        """
        tokens, load = self.outstanding_tokens + self.elsewhere.tokens, self.load
        own = self.outstanding_prefills + self.elsewhere.prefills
        decoding = self.outstanding_requests + self.elsewhere.requests - own
        if now - self._load_at > LOAD_SECONDS:
            return Busy(tokens, own, decoding)
        used, requests = (
            load.kv_tokens_used,
            load.waiting_requests + load.running_requests - load.decode_sequences,
        )
        foreign = max(0.0, 1 - own / requests) if own and requests > 0 else 1.0
        return Busy(
            tokens + foreign * (load.waiting_prefill_tokens + load.running_prefill_tokens),
            max(own, requests),
            max(decoding, load.decode_sequences),
            load.kv_tokens_total,
            load.kv_tokens_total - used,
            self.held_seconds / used if used else 0.0,
            (self.held_seconds or PRIOR_HELD_SECONDS) / used if used else 0.0,
        )

    def held(self, seconds: float) -> None:
        """A request has ended that had KV space for about `seconds`."""
        old = self.held_seconds
        self.held_seconds = old + HELD_WEIGHT * (seconds - old) if old else seconds

    def idle(self) -> None:
        """Its last request has ended."""
        if self.mirror.draining:
            self.drain_news.set()

    def tick(self, now: float) -> None:
        """A drain that nobody confirms any more is over: the agent may be gone, and the engine go on."""
        self.breaker.tick(now)
        self.trust.tick()
        if self.mirror.draining and not self.feed_live and now - self._feed_lost > self._stale_seconds:
            self.mirror.draining = False

    def computes(self, keys: Sequence[bytes], now: float) -> list[bytes]:
        """The keys it does not hold yet: what a dispatch makes pending."""
        if not self.mirrored(now):
            return self.approximate.missing(keys)
        missing = self.mirror.missing(keys)
        return missing if self._gpu_believed() else self.approximate.missing(missing)

    def observed(self, predicted: float, seconds: float) -> None:
        """A first byte came after `seconds`: move this replica's correction."""
        self._set_speeds(correction=corrected(self.speeds.correction, predicted, seconds))

    def pool_prefill(self, prefill: PrefillModel) -> None:
        """Use the speed of equal engines until this one has its own figure."""
        if self.measured is None:
            self._set_speeds(prefill=prefill)

    def doubt_gpu(self, record: RequestRecord) -> bool:
        """True once when the engine reused from its GPU though the feed says that nothing is there.

        Its KV events do not reach the agent then; the own dispatches stand in until a key comes.
        """
        wrong = record.hit_tokens.get(Tier.GPU, 0) >= self.chunk_tokens
        if not wrong or self.gpu_doubted or not self.mirror.gpu_known or self.mirror.on_gpu():
            return False
        self.gpu_doubted = True
        return True

    def _gpu_believed(self) -> bool:
        return self.mirror.gpu_known and not self.gpu_doubted

    # ---- feed

    def apply(self, message: feed.FeedMessage, now: float) -> RequestRecord | None:
        """Take one message of the feed; returns the record it carries. Raises FeedError."""
        feed_limits.check(message)
        if isinstance(message, feed.Opening):
            if self.feed_live:
                raise FeedError("a new epoch began")
            self.mirror.open(message)
            self.chunk_tokens = message.chunk_tokens or CHUNK_TOKENS
            self.block_tokens = message.block_tokens or BLOCK_TOKENS
            known = bool(message.fingerprint)
            self._identity = (message.fingerprint, message.group, message.chunk_tokens) if known else None
            self.feed_live, self.feed_problem = True, ""
            self._drain_told()
            return None
        self.mirror.follow(message.sequence)
        if isinstance(message, feed.Delta):
            self.pending.committed(self.mirror.delta(message))
            self.gpu_doubted = self.gpu_doubted and message.tier != Tier.GPU
        elif isinstance(message, feed.Snapshot):
            self.mirror.snapshot(message)
        elif isinstance(message, feed.Load):
            self._take_load(message, now)
        elif isinstance(message, feed.State):
            self.mirror.state(message)
            self._drain_told()
        else:
            return message.record
        return None

    def feed_lost(self, problem: str, now: float) -> None:
        """The feed's connection ended."""
        if self.feed_live:
            self.feed_live, self._feed_lost = False, now
            self.feed_breaks += 1
        self.feed_problem = problem

    def unpriced(self, error: Exception) -> None:
        """Its cost cannot be calculated from what is known of it; said once per cause."""
        if str(error) != self._price_problem:
            self._price_problem = str(error)
            _log.warning("%s is priced as if nothing were known of it: %s", self.name, error)

    def unreachable(self, problem: str) -> None:
        """A connection to the engine was refused or reset: no request until a check passes."""
        self.healthy, self.problem = False, problem

    def started(self) -> None:
        """The engine came up, or back: what was sent to it before is gone."""
        self.starts += 1
        self.approximate.clear()
        self.pending.clear()
        self.breaker.reset()

    def _drain_told(self) -> None:
        if self.mirror.draining:
            self.drain_news.set()

    def _take_load(self, message: feed.Load, now: float) -> None:
        self.load, self._load_at = message.load, now
        self.engine_connected = message.engine_connected
        if message.load.prefill_seconds_per_token > 0:
            self.measured = PrefillModel(
                message.load.prefill_seconds_per_token, message.load.prefill_seconds_per_token2
            )
        self.mirror.tiers_answer(message.speeds)
        prices = dict(PRIOR_PRICES)
        for speed in message.speeds:
            if speed.tier in _KNOWN_TIERS and speed.bytes_per_second > 0:
                prices[speed.tier] = TierPrice(speed.latency_seconds, speed.bytes_per_second)
        self.speeds = Speeds(
            self.measured or self.speeds.prefill,
            prices,
            message.chunk_bytes if message.chunk_bytes > 0 else PRIOR_CHUNK_BYTES,
            self.measured is not None or self.speeds.measured,
            self.speeds.correction,
        )

    def _set_speeds(self, prefill: PrefillModel | None = None, correction: float | None = None) -> None:
        old = self.speeds
        self.speeds = Speeds(
            prefill or old.prefill,
            old.prices,
            old.chunk_bytes,
            old.measured or prefill is not None,
            old.correction if correction is None else correction,
        )
