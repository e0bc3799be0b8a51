"""The mind in this process: `interface.Mind` over replicas, tokens, choice and records.

Called by the relay (decide, report), by feed readers (`feed_message`) and the fleet (replicas
come and go). One loop owns all of it; nothing here blocks. Deciding (`_consider`, the policy) is
apart from acting (`_dispatch`).
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from os import urandom
from random import Random
from typing import Any, NamedTuple

import msgspec

from kvist_connector.keys import root_key
from kvist_connector.protocol import feed
from kvist_router.access.quota import CacheQuotas
from kvist_router.access.salt import tenant_salt
from kvist_router.errors import Refused
from kvist_router.metrics import MindMetrics
from kvist_router.mind.admission.gate import Gate
from kvist_router.mind.choice import Candidate, Policy
from kvist_router.mind.eligible import model_of
from kvist_router.mind.inflight import Elsewhere, InFlight, InFlightMap
from kvist_router.mind.interface import Decision, Metadata, Refusal, Report
from kvist_router.mind.models import ServedModel
from kvist_router.mind.outcome import Outcomes
from kvist_router.mind.policies import policy as policy_of
from kvist_router.mind.potential import Potential
from kvist_router.mind.pricing import candidate, unknown
from kvist_router.mind.prompts import Prompts, PromptSource
from kvist_router.mind.records import DecisionRecord, Records, considered
from kvist_router.mind.replica import Identity, Replica
from kvist_router.mind.responses import ResponseFinder
from kvist_router.mind.shadows import Shadows, dry_run
from kvist_router.mind.shared import SharedKeys
from kvist_router.mind.waiting import Waiting
from kvist_router.relay.edits import edit_body
from kvist_router.settings import RouterSettings
from kvist_router.tokens.keys import Chain, KeyMemo
from kvist_router.tokens.lru import SizedLRU
from kvist_router.tokens.request import Request, parse, stored

PENDING_GRACE_SECONDS = 30.0  # beyond twice the predicted time, until a pending key is given up
ROOTS_BYTES, ROOT_BYTES = 2**20, 300  # cache of root keys: one for every tenant
PREFIX_CHUNKS = 4  # leading chunks by which prompts begin alike


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
    """The replicas' prices, and the keys of the prompts at each, in their order."""

    candidates: list[Candidate]
    keys: list[list[bytes]]


class _Decided(NamedTuple):
    """What the policy said, and of which candidates."""

    candidates: list[Candidate]
    replica: Replica
    chosen: Candidate
    keys: list[bytes]
    reason: str
    elsewhere: dict[str, Elsewhere]


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
        finder: ResponseFinder | None = None,
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.shared = SharedKeys()
        self.unheard: Callable[[], int] = lambda: 0  # routers whose dispatches are not known (neighbours/)
        self.neighbours: Callable[[], list[dict[str, Any]]] = list  # all of them, for the admin port
        self.records = Records(settings.records)
        self.source = source
        self.metrics = metrics
        limits = settings.limits
        longest = 2 * (limits.first_byte_seconds + limits.idle_seconds)
        self.in_flight = InFlightMap(limits.in_flight, max(3600.0, longest))
        self._waiting = Waiting(self.replicas, limits.queue_seconds, metrics)
        shadows: dict[str, Policy] = {name: policy_of(name, settings.weights) for name in settings.shadows}
        self._shadows = Shadows(shadows, metrics)
        self._outcomes = Outcomes(self.records, self.in_flight, metrics, source, clock)
        self._settings = settings
        self._policy = policy
        self.gate = Gate(
            settings.admission, settings.tenants, settings.tenant.others, self._room, metrics.admission, clock
        )
        self._finder = finder
        self.potential = Potential(self.replicas, clock)
        self._memo = KeyMemo(settings.tokens.key_cache_chunks)
        self._roots: SizedLRU[tuple[Identity, str, str], bytes] = SizedLRU(ROOTS_BYTES)
        self._secret = secret
        self._quotas = CacheQuotas(settings.tenants, settings.tenant.others)
        self._clock = clock
        self._random = random or Random()

    # ---- interface.Mind

    async def decide(self, body: bytes, metadata: Metadata) -> Decision | Refusal:
        """See interface.Mind."""
        started = self._clock()
        try:
            if not metadata.id:
                self.gate.ask(metadata.tenant)
            question, replicas = await self._question(body, metadata)
            replicas = await self._admit(question, replicas, metadata)
            decision = self._send(question, replicas, body, metadata)
        except Refused as refused:
            self.metrics.refusals.labels(refused.refusal.status).inc()
            return refused.refusal
        self.metrics.decision.observe(self._clock() - started)
        return decision

    def _send(
        self, question: _Question, replicas: list[Replica], body: bytes, metadata: Metadata
    ) -> Decision:
        """Choose and dispatch; raises Refused. Whatever happens, a place that is not used is given back."""
        decision: Decision | None = None
        try:
            decided = self._decide(question, replicas, self._policy, self._shadows)
            self.gate.shed(metadata.tenant, decided.chosen.cost.total)
            decision = self._dispatch(question, decided, body, metadata)
            return decision
        finally:
            if decision is None:
                self.in_flight.end(question.id)
                self.gate.leave(question.id)

    async def explain(self, body: bytes, metadata: Metadata) -> DecisionRecord | Refusal:
        """The record of what `decide` would do now; nothing is sent, counted or kept."""
        try:
            question, replicas = await self._question(body, metadata)
        except Refused as refused:
            return refused.refusal
        decided = self._decide(question, replicas, dry_run(self._policy), self._shadows.dry_run())
        record = self._record(question, decided, metadata)
        record.outcome = "not sent"
        record.considered = considered(decided.candidates, self._settings.weights.standstill)
        return record

    async def report(self, request_id: str, report: Report) -> None:
        """See interface.Mind."""
        self._heard(request_id, report)

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
        self.gate.look()
        self.potential.tick()
        for replica in self.replicas.values():
            replica.pending.expire(now)
            replica.tick(now)
        for request_id in self.in_flight.expired(now):
            self._heard(request_id, Report("failed", error="the relay never reported an end"))

    def use(self, settings: RouterSettings) -> None:
        """Other settings, as far as they can change while requests run (reload.py)."""
        if (settings.policy, settings.weights) != (self._settings.policy, self._settings.weights):
            self._policy = policy_of(settings.policy, settings.weights)
        self._settings = settings
        self._quotas = CacheQuotas(settings.tenants, settings.tenant.others)
        self.gate.use(settings.admission, settings.tenants, settings.tenant.others)
        self.gate.look()

    def _heard(self, request_id: str, report: Report) -> None:
        entry = self.in_flight.get(request_id)
        if entry is not None:
            entry.replica.breaker.report(request_id, report, self._clock())
        self._outcomes.report(request_id, report)
        if report.event != "first_byte":
            self.gate.leave(request_id, report.tokens)

    def _room(self, per_replica: int) -> int:
        """Requests that may be under way; at least one, which finds out when all replicas are down."""
        return max(1, per_replica * sum(replica.serves for replica in self.replicas.values()))

    def _pool(self, measured: Replica) -> None:
        if measured.measured is None:
            return
        for replica in self.replicas.values():
            if replica.measured is None and replica.models.keys() == measured.models.keys():
                replica.pool_prefill(measured.measured)

    # ---- deciding

    async def _question(self, body: bytes, metadata: Metadata) -> tuple[_Question, list[Replica]]:
        request = self._request(body, metadata)
        known = len(self.in_flight) + len(self._waiting) + len(self.gate)
        if self.in_flight.full or known >= self._settings.limits.in_flight:
            raise Refused(Refusal(503, "the router is at its limit of requests in flight",
                                  "service_unavailable", code="overloaded", retry_after=1))  # fmt: skip
        replicas = await self._waiting.replicas(request.model, metadata)
        if self._finder is not None:
            replicas = await self._finder.narrow(request, replicas)
        model = model_of(replicas[0], request.model)
        prompts = await self.source.prompts(request, replicas[0].url, metadata.skimmed)
        # A drain may have begun meanwhile, and once we have acknowledged it nothing more may go there.
        replicas = [replica for replica in replicas if replica.takes] or replicas
        longest = max([prompt.tokens for prompt in prompts.each], default=0)
        if model.longest is not None and longest > model.longest:
            raise Refused(_too_long(longest, model.longest, request))
        question = _Question(
            metadata.id or urandom(16).hex(),
            request,
            model,
            self._salt(request, metadata),
            prompts,
            prompts.tokens,
        )
        return question, replicas

    def _request(self, body: bytes, metadata: Metadata) -> Request:
        if metadata.path == "stored":
            return stored(metadata.response)
        return parse(body, metadata.path, separated=self._secret is not None)

    async def _admit(self, question: _Question, replicas: list[Replica], metadata: Metadata) -> list[Replica]:
        """Wait for its turn: the replicas that can take it then; raises Refused."""
        if metadata.id:
            self.gate.again(question.id, metadata.tenant)
            return replicas
        tokens = question.tokens * question.request.copies
        if not await self.gate.enter(question.id, metadata.tenant, tokens):
            return replicas
        found: list[Replica] = []
        try:
            found = await self._waiting.replicas(question.request.model, metadata)
            return [replica for replica in found if replica in replicas] or found
        finally:
            if not found:
                self.gate.leave(question.id)

    def _salt(self, request: Request, metadata: Metadata) -> str:
        if self._secret is None:
            return request.salt
        return tenant_salt(self._secret, metadata.tenant)

    def _decide(
        self, question: _Question, replicas: list[Replica], policy: Policy, shadows: Shadows
    ) -> _Decided:
        found = self._consider(question, replicas, policy.feeds)
        prefix = _prefix(found.keys[0])
        unheard = self.unheard()
        choice = policy.choose(found.candidates, self._random, prefix, unheard)
        at = [replica.name for replica in replicas].index(choice.name)
        elsewhere: dict[str, Elsewhere] = {}
        if shadows:
            priced = {policy.feeds: found.candidates}

            def candidates(feeds: bool) -> list[Candidate]:
                if feeds not in priced:
                    priced[feeds] = self._consider(question, replicas, feeds).candidates
                return priced[feeds]

            elsewhere = shadows.choose(choice.name, candidates, policy.feeds, self._random, prefix, unheard)
        chosen, keys = found.candidates[at], found.keys[at]
        return _Decided(found.candidates, replicas[at], chosen, keys, choice.reason, elsewhere)

    def _consider(self, question: _Question, replicas: list[Replica], feeds: bool) -> _Considered:
        now, memo, tokens = self._clock(), self._memo, question.tokens
        keyed: dict[Identity, _Keyed] = {}
        name = question.request.model or question.model.name
        candidates, keys = [], []
        for replica in replicas:
            identity = replica.identity(name)
            try:
                prompts = keyed.get(identity)
                if prompts is None:
                    prompts = keyed[identity] = self._keyed(question, identity)
                found, known = candidate(replica, prompts.chains, tokens, memo, now, feeds), prompts.keys
                # Its two terms that nothing bounds; what is multiplied with them feed_limits.py does.
                if not math.isfinite(found.cost.total + found.occupied):
                    raise ArithmeticError("its predicted cost is not a finite number")
            except (ArithmeticError, ValueError, struct.error) as error:
                # What one feed said must not fail all requests: it is priced as if it had said nothing.
                replica.unpriced(error)
                found, known = unknown(replica, tokens), []
            candidates.append(found)
            keys.append(known)
        return _Considered(candidates, keys)

    def _keyed(self, question: _Question, identity: Identity) -> _Keyed:
        root = self._root(identity, question.model.name if question.model.adapter else "", question.salt)
        chunk_tokens = identity[2]
        chains = [self._memo.chain(root, prompt, chunk_tokens) for prompt in question.prompts.each]
        if len(chains) == 1:
            return _Keyed(chains, chains[0].keys)
        return _Keyed(chains, [key for chain in chains for key in chain.keys])

    def _root(self, identity: Identity, lora: str, salt: str) -> bytes:
        root = self._roots.get((identity, lora, salt))
        if root is None:
            root = root_key(identity[0], group=identity[1], lora=lora, salt=salt)
            self._roots.put((identity, lora, salt), root, ROOT_BYTES + len(salt))
        return root

    # ---- acting

    def _dispatch(
        self,
        question: _Question,
        decided: _Decided,
        body: bytes,
        metadata: Metadata,
    ) -> Decision:
        replica, keys, cost, now = decided.replica, decided.keys, decided.chosen.cost, self._clock()
        replica.breaker.sent(question.id)
        computes, ttft = replica.computes(keys, now), cost.total
        ready = now + ttft
        if computes:
            replica.pending.add(computes, ready, ready + ttft + PENDING_GRACE_SECONDS, question.id)
        self.in_flight.begin(
            InFlight(
                question.id,
                replica,
                keys,
                computes,
                max(0, question.tokens - cost.reused),
                ttft,
                now,
                cost.space > 0,
                decided.elsewhere,
            )
        )
        record = self._record(question, decided, metadata)
        self.records.add(record, decided.candidates, self._settings.weights.standstill)
        if len(question.prompts.each) == 1:
            self.potential.saw(replica, keys, question.tokens, cost.reused)
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
            body=self._edited(body, question, metadata.tenant),
            context_tokens=question.model.longest or 0,
        )

    def _edited(self, body: bytes, question: _Question, tenant: str) -> bytes | None:
        if question.request.path in ("tokens", "stored"):  # nothing of these is kept
            return None
        tags = question.request.tags
        if self._secret is None:
            return edit_body(body, tags, None)
        own = self._quotas.tags(tenant)
        return edit_body(body, (*(tags or ()), *own) if own else tags, question.salt)

    def _record(self, question: _Question, decided: _Decided, metadata: Metadata) -> DecisionRecord:
        # The connector sums copies and prompt lists under one id, so only a single prompt can be compared.
        # The keys of an adapter's chunks depend on its revision, which the router does not know.
        single = len(question.prompts.each) == 1 and question.request.copies == 1
        comparable = single and not question.model.adapter
        cost, name, keys = decided.chosen.cost, decided.replica.name, decided.keys
        return DecisionRecord(
            id=question.id,
            time=time.time(),
            path=metadata.path,
            model=question.model.name,
            policy=self._settings.policy,
            replica=name,
            reason=decided.reason,
            prompt_tokens=question.tokens,
            predicted_tokens=cost.reused,
            predicted_ttft=cost.total,
            tokens_from=question.prompts.source,
            streamed=question.request.stream,
            beyond_plain=sorted(question.prompts.used),
            attempts=[*metadata.exclude, name],
            last_chunk_key=keys[-1].hex() if comparable and keys else "",
            tenant=metadata.tenant,
            elsewhere={name: other.replica for name, other in decided.elsewhere.items()},
        )


def _prefix(keys: list[bytes]) -> bytes:
    return keys[min(len(keys), PREFIX_CHUNKS) - 1] if keys else b""


def _too_long(tokens: int, longest: int, request: Request) -> Refusal:
    return Refusal(
        400,
        f"the prompt has {tokens} tokens, but the model's context length is {longest}; shorten the prompt",
        param={"chat": "messages", "responses": "input"}.get(request.path, "prompt"),
        code="context_length_exceeded",
    )
