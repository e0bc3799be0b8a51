"""The mind in this process: `interface.Mind` over replicas, tokens, choice and records.

Called by the relay (decide, report), by feed readers (`feed_message`) and the fleet (replicas
come and go). One loop owns all of it; nothing here blocks. Deciding (`_consider`, the policy) is
apart from acting (`_dispatch`).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterator
from os import urandom
from random import Random
from typing import NamedTuple

import msgspec

from kvist_connector.keys import root_key
from kvist_connector.protocol import feed
from kvist_router.errors import Refused
from kvist_router.metrics import MindMetrics
from kvist_router.mind.choice import Candidate, Choice, Policy
from kvist_router.mind.cost import Cost, prompt_cost
from kvist_router.mind.eligible import model_of
from kvist_router.mind.inflight import InFlight, InFlightMap
from kvist_router.mind.interface import Decision, Metadata, Refusal, Report
from kvist_router.mind.models import ServedModel
from kvist_router.mind.outcome import Outcomes
from kvist_router.mind.prompts import Prompts, PromptSource
from kvist_router.mind.records import Considered, DecisionRecord, Records
from kvist_router.mind.replica import Chain, Identity, Replica
from kvist_router.mind.shared import SharedKeys
from kvist_router.mind.waiting import Waiting
from kvist_router.relay.edits import edit_body
from kvist_router.settings import RouterSettings
from kvist_router.tokens.keys import TOKEN_BYTES, KeyMemo
from kvist_router.tokens.lru import SizedLRU
from kvist_router.tokens.request import Request, parse

PENDING_GRACE_SECONDS = 30.0  # beyond twice the predicted time, until a pending key is given up
ROOTS_BYTES, ROOT_BYTES = 2**20, 300  # cache of root keys: one for every tenant
TOKEN_CHARACTERS = 4  # of a prompt whose tokens nobody could tell


class _Question(msgspec.Struct, frozen=True):
    """A parsed request with its tokens."""

    id: str
    request: Request
    model: ServedModel
    salt: str
    prompts: Prompts
    tokens: int


class _Keyed(NamedTuple):
    """The prompts of a question under one root."""

    chains: list[Chain]
    keys: list[bytes]  # of all of them


class _Considered(NamedTuple):
    replica: Replica
    candidate: Candidate
    keys: list[bytes]


class LocalMind:
    """`clock` is monotonic seconds; `random` breaks ties."""

    def __init__(
        self,
        settings: RouterSettings,
        policy: Policy,
        source: PromptSource,
        metrics: MindMetrics,
        secret: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.shared = SharedKeys()
        self.records = Records(settings.records)
        self.source = source
        self.metrics = metrics
        limits = settings.limits
        longest = 2 * (limits.first_byte_seconds + limits.idle_seconds)
        self.in_flight = InFlightMap(limits.in_flight, max(3600.0, longest))
        self._waiting = Waiting(self.replicas, limits.queue_seconds, metrics)
        self._outcomes = Outcomes(self.records, self.in_flight, metrics, source, clock)
        self._settings = settings
        self._policy = policy
        self._memo = KeyMemo(settings.tokens.key_cache_chunks)
        self._roots: SizedLRU[tuple[Identity, str, str], bytes] = SizedLRU(ROOTS_BYTES)
        self._secret = secret
        self._clock = clock
        self._random = random or Random()

    # ---- interface.Mind

    async def decide(self, body: bytes, metadata: Metadata) -> Decision | Refusal:
        """See interface.Mind."""
        started = self._clock()
        try:
            question, replicas = await self._question(body, metadata)
            considered = list(self._consider(question, replicas))
            choice = self._policy.choose([item.candidate for item in considered], self._random)
        except Refused as refused:
            self.metrics.refusals.labels(refused.refusal.status).inc()
            return refused.refusal
        decision = self._dispatch(question, considered, choice, body, metadata)
        self.metrics.decision.observe(self._clock() - started)
        return decision

    async def report(self, request_id: str, report: Report) -> None:
        """See interface.Mind."""
        self._outcomes.report(request_id, report)

    # ---- feeds and housekeeping

    def feed_message(self, replica: Replica, message: feed.FeedMessage) -> None:
        """Apply a message of a replica's feed; raises FeedError."""
        record = replica.apply(message, self._clock())
        if record is not None:
            self._outcomes.recorded(replica, record)
        elif isinstance(message, feed.Load) and replica.measured is not None:
            self._pool(replica)

    def tick(self) -> None:
        """Once a second: end what nobody ends."""
        now = self._clock()
        self._waiting.look()
        for replica in self.replicas.values():
            replica.pending.expire(now)
            replica.tick(now)
        for request_id in self.in_flight.expired(now):
            self._outcomes.report(request_id, Report("failed", error="the relay never reported an end"))

    def _pool(self, measured: Replica) -> None:
        if measured.measured is None:
            return
        for replica in self.replicas.values():
            if replica.measured is None and replica.models.keys() == measured.models.keys():
                replica.pool_prefill(measured.measured)

    # ---- deciding

    async def _question(self, body: bytes, metadata: Metadata) -> tuple[_Question, list[Replica]]:
        request = parse(body, metadata.path)
        if self.in_flight.full or len(self.in_flight) + len(self._waiting) >= self._settings.limits.in_flight:
            raise Refused(Refusal(503, "the router is at its limit of requests in flight",
                                  "service_unavailable", code="overloaded", retry_after=1))  # fmt: skip
        replicas = await self._waiting.replicas(request.model, metadata)
        model = model_of(replicas[0], request.model)
        prompts = await self.source.prompts(request, replicas[0].url)
        # A drain may have begun meanwhile, and once we have acknowledged it nothing more may go there.
        replicas = [replica for replica in replicas if replica.takes] or replicas
        lengths = [len(prompt.packed) // TOKEN_BYTES for prompt in prompts.each]
        if model.longest is not None and lengths and max(lengths) > model.longest:
            raise Refused(_too_long(max(lengths), model.longest, request))
        tokens = sum(lengths) if lengths else len(body) // TOKEN_CHARACTERS
        question = _Question(
            metadata.id or urandom(16).hex(), request, model, self._salt(request, metadata), prompts, tokens
        )
        return question, replicas

    def _salt(self, request: Request, metadata: Metadata) -> str:
        if self._secret is None:
            return request.salt
        return hmac.new(self._secret, metadata.tenant.encode(), hashlib.sha256).hexdigest()

    def _consider(self, question: _Question, replicas: list[Replica]) -> Iterator[_Considered]:
        now = self._clock()
        keyed: dict[Identity, _Keyed] = {}
        name = question.request.model or question.model.name
        for replica in replicas:
            identity = replica.identity(name)
            prompts = keyed.get(identity)
            if prompts is None:
                prompts = keyed[identity] = self._keyed(question, identity)
            cost = self._cost(question, replica, prompts.chains, now)
            candidate = Candidate(
                replica.name, cost, replica.outstanding_tokens, replica.outstanding_requests
            )
            yield _Considered(replica, candidate, prompts.keys)

    def _keyed(self, question: _Question, identity: Identity) -> _Keyed:
        root = self._root(identity, question.model.name if question.model.adapter else "", question.salt)
        chunk_tokens = identity[2]
        chains = [
            Chain(root, self._memo.segment_keys(root, prompt.segments, chunk_tokens), prompt.packed)
            for prompt in question.prompts.each
        ]
        return _Keyed(chains, [key for chain in chains for key in chain.keys])

    def _root(self, identity: Identity, lora: str, salt: str) -> bytes:
        root = self._roots.get((identity, lora, salt))
        if root is None:
            root = root_key(identity[0], group=identity[1], lora=lora, salt=salt)
            self._roots.put((identity, lora, salt), root, ROOT_BYTES + len(salt))
        return root

    def _cost(self, question: _Question, replica: Replica, chains: list[Chain], now: float) -> Cost:
        speeds, queue = replica.speeds, replica.queue_seconds(now)
        space = max(0.0, replica.space_seconds(now, question.tokens) - queue)
        if not chains:
            recompute = speeds.prefill.seconds(0, question.tokens) * speeds.correction
            return Cost(queue, 0.0, 0.0, recompute, 0, space)
        total: Cost | None = None
        for chain in chains:
            match = replica.match(chain, self._memo, now)
            tokens = len(chain.packed) // TOKEN_BYTES
            cost = prompt_cost(
                match, tokens, replica.chunk_tokens, replica.block_tokens, speeds, queue, space
            )
            total = cost if total is None else _together(total, cost)
        assert total is not None
        return total

    # ---- acting

    def _dispatch(
        self,
        question: _Question,
        considered: list[_Considered],
        choice: Choice,
        body: bytes,
        metadata: Metadata,
    ) -> Decision:
        chosen = next(item for item in considered if item.candidate.name == choice.name)
        replica, cost, now = chosen.replica, chosen.candidate.cost, self._clock()
        computes = replica.computes(chosen.keys, now)
        ready = now + cost.total
        if computes:
            replica.pending.add(computes, ready, ready + cost.total + PENDING_GRACE_SECONDS, question.id)
        self.in_flight.begin(
            InFlight(
                question.id,
                replica,
                chosen.keys,
                computes,
                max(0, question.tokens - cost.reused),
                cost.total,
                now,
            )
        )
        self.records.add(self._record(question, considered, chosen, choice, metadata))
        self.metrics.sent(replica.name)
        self.metrics.prompt.inc(question.tokens)
        self.metrics.predicted.inc(cost.reused)
        return Decision(
            id=question.id,
            replica=replica.name,
            url=replica.url,
            predicted_tokens=cost.reused,
            prompt_tokens=question.tokens,
            stream=question.request.stream,
            body=edit_body(body, question.request.tags, question.salt if self._secret is not None else None),
        )

    def _record(
        self,
        question: _Question,
        considered: list[_Considered],
        chosen: _Considered,
        choice: Choice,
        metadata: Metadata,
    ) -> DecisionRecord:
        # The connector sums copies and prompt lists under one id, so only a single prompt can be compared.
        # The keys of an adapter's chunks depend on its revision, which the router does not know.
        single = len(question.prompts.each) == 1 and question.request.copies == 1
        comparable = single and not question.model.adapter
        return DecisionRecord(
            id=question.id,
            time=time.time(),
            path=metadata.path,
            model=question.model.name,
            policy=self._settings.policy,
            replica=chosen.replica.name,
            reason=choice.reason,
            prompt_tokens=question.tokens,
            predicted_tokens=chosen.candidate.cost.reused,
            predicted_ttft=chosen.candidate.cost.total,
            tokens_from=question.prompts.source,
            streamed=question.request.stream,
            considered=[_considered(item.candidate) for item in considered],
            attempts=[*metadata.exclude, chosen.replica.name],
            last_chunk_key=chosen.keys[-1].hex() if comparable and chosen.keys else "",
        )


def _considered(candidate: Candidate) -> Considered:
    cost = candidate.cost
    return Considered(
        candidate.name,
        cost.total,
        cost.queue,
        cost.load,
        cost.pending,
        cost.recompute,
        cost.reused,
        cost.space,
    )


def _together(first: Cost, second: Cost) -> Cost:
    """Two prompts of one request: one queue, both loads and computations."""
    return Cost(
        first.queue,
        first.load + second.load,
        max(first.pending, second.pending),
        first.recompute + second.recompute,
        first.reused + second.reused,
        first.space,
    )


def _too_long(tokens: int, longest: int, request: Request) -> Refusal:
    return Refusal(
        400,
        f"the prompt has {tokens} tokens, but the model's context length is {longest}; shorten the prompt",
        param="messages" if request.path == "chat" else "prompt",
        code="context_length_exceeded",
    )
