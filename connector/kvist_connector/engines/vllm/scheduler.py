"""The scheduler half: decides what is loaded and stored, and what counts. Torch-free.

Called by connector.py from vLLM's scheduler, always on one thread; agent messages are
taken from a link at every hook. It never raises for the cache's sake and never waits
longer than ANSWER_WAIT once per request.

Steps overlap under async scheduling: a step's plan, its report and what it may commit
belong together by the step's number.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvist_connector.engines.inbox import Arrival, Closed
from kvist_connector.engines.vllm.config import EngineConfig
from kvist_connector.engines.vllm.load_report import KvSpace, LoadPacer, engine_load
from kvist_connector.engines.vllm.lora import AdapterRevisions
from kvist_connector.engines.vllm.metadata import StepPlan, StepReport
from kvist_connector.engines.vllm.outbox import Outbox
from kvist_connector.engines.vllm.prefill_meter import PrefillMeter
from kvist_connector.engines.vllm.requests import (
    RequestState,
    hits_by_tier,
    is_cacheable,
    load_pieces,
    loadable_tokens,
    router_request_id,
    tags_of,
)
from kvist_connector.engines.vllm.stores import StoreLedger, Wanted
from kvist_connector.keys import root_key
from kvist_connector.protocol.engine import (
    Answer,
    Arena,
    EngineLoad,
    Evicted,
    Grant,
    Lookup,
    RequestRecord,
    Reset,
    Step,
    ToAgent,
    Welcome,
)
from kvist_connector.protocol.tiers import Tier
from kvist_connector.transfer.plan import Piece

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

ANSWER_WAIT = 0.002  # seconds a request's first match call may wait for its Answer
ANSWER_DEADLINE = 0.25  # after that an agent that has not answered at all is not waited for
PENDING_DEADLINE = 30.0  # backstop; the agent answers pending lookups by its own shorter deadline
MAX_STEPS = 64  # unreported steps that are remembered
PUSH_WORK_DEADLINE = 1.0  # seconds the engine is kept stepping for stores under way


class Link(Protocol):
    """The connection as the scheduler half sees it."""

    def send(self, message: ToAgent) -> bool: ...
    def take(self) -> list[Arrival]: ...
    def wait(self, seconds: float) -> bool: ...


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


class SchedulerHalf:
    """One per engine."""

    def __init__(
        self,
        config: EngineConfig,
        link: Link,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._link = link
        self._clock = clock
        self._wall = wall
        self._arena: Arena | None = None
        self._connected = False
        self._enabled = False
        self._states: dict[str, RequestState] = {}
        self._loads: dict[str, list[Piece]] = {}
        self._ledger = StoreLedger(config.ranks)
        self._records: OrderedDict[int, StepRecord] = OrderedDict()
        self._step = 0
        self._outbox = Outbox()
        self._meter = PrefillMeter()
        self._pacer = LoadPacer()
        self._adapters = AdapterRevisions()
        self._last_report = 0.0
        self._last_store = float("-inf")
        self.kv_used: Callable[[], float] = lambda: 0.0

    # ---- hooks of a request

    def new_request(self, request: Request) -> None:
        """Look the prompt up; the answer is waited for when the engine asks."""
        state = RequestState(request, is_cacheable(request), tags_of(request), self._clock(), self._wall())
        self._states[request.request_id] = state
        self._pump()
        self._ask(state)

    def matched_tokens(self, request: Request, local_tokens: int) -> int | None:
        """Tokens to load after the engine's own hit; None: ask again."""
        state = self._states.get(request.request_id)
        if state is None:
            return 0
        self._pump()
        self._ask_after_preemption(state)
        self._await_first_answer(state)
        if self._awaiting(state):
            return None
        state.local_tokens = local_tokens
        hit = state.hit_chunks() * self._config.chunk_tokens
        return loadable_tokens(hit, request.num_tokens, local_tokens, self._config.block_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine decided; only what it says it will load is loaded."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        self._loads.pop(state.id, None)
        if external_tokens <= 0:
            self._release(state)
            return
        table = blocks.get_block_ids()[0]
        block, chunk = self._config.block_tokens, self._config.chunk_tokens
        self._loads[state.id] = load_pieces(state, table, state.local_tokens, external_tokens, block, chunk)
        if not state.recorded:
            state.hit_tokens = hits_by_tier(state, state.local_tokens, external_tokens, chunk)

    def finished(self, request: Request) -> None:
        """Ended or aborted; its last step may still be under way."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        state.finished = True
        self._loads.pop(state.id, None)
        self._drop_if_over(state)

    # ---- hooks of a step

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        """Loads and stores of this step."""
        self._pump()
        self._step += 1
        for request_id in output.preempted_req_ids or ():
            if (state := self._states.get(request_id)) is not None:
                self._ask_after_preemption(state)
        record = StepRecord(self._step, self._clock())
        loads: list[Piece] = []
        stores: list[Piece] = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if (state := self._states.get(request_id)) is None:
                continue
            pieces = self._loads.pop(request_id, [])
            self._note_member(record, state, scheduled, pieces)
            loads += pieces
            stores += self._plan_stores(output, record, state, scheduled)
        reporting = bool(output.num_scheduled_tokens) or self._ledger.under_way > 0
        if output.num_scheduled_tokens:
            self._remember(record)
        else:
            self._flush()
        if stores:
            self._last_store = record.began
        epoch = self._arena.epoch if self._arena is not None else 0
        return StepPlan(record.step, epoch, tuple(loads), tuple(stores), reporting)

    def step_done(self, output: KVConnectorOutput) -> None:
        """What the workers report of a step: commits, releases, records; one message to the agent."""
        self._pump()
        report = output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            record = self._records.pop(report.step, None)
            self._note_failures(record, set(output.invalid_block_ids or ()), report.failed_keys)
            self._ledger.answer(report.filled, report.unfilled)
            commits, discards = self._ledger.settle()
            self._outbox.commits += commits
            self._outbox.discards += discards
            if record is not None:
                self._close_record(record, report)
            self._forget_lost_steps(report.step)
        self._flush()

    def has_pending_stores(self) -> bool:
        """Keeps an otherwise idle engine stepping while copies of its last step are under way."""
        return (
            self._connected
            and self._ledger.under_way > 0
            and self._clock() - self._last_store < PUSH_WORK_DEADLINE
        )

    def reset_cache(self) -> bool:
        """The engine's cache was reset with its connector: nothing stored counts any more."""
        self._pump()
        self._ledger.known.clear()
        for state in self._states.values():
            state.refs, state.stored_chunks = (), 0
        return self._link.send(Reset()) or not self._connected

    # ---- lookups

    def _ask(self, state: RequestState) -> None:
        """Send the lookup, if there is somebody to ask and something to ask for."""
        if not self._prepare_keys(state) or not self._enabled or not state.keys:
            return
        state.preemptions = state.request.num_preemptions
        message = Lookup(
            request=state.id,
            keys=b"".join(state.keys),
            tokens=state.request.num_tokens,
            tags=state.tags,
        )
        if self._link.send(message):
            state.asked_at, state.answered_at = self._clock(), None
            state.refs, state.tiers = (), b""
            state.waited, state.pending, state.leased = False, False, True

    def _ask_after_preemption(self, state: RequestState) -> None:
        """A preempted request matches anew, with what it decoded; its old leases are gone."""
        if state.preemptions == state.request.num_preemptions:
            return
        state.preemptions = state.request.num_preemptions
        state.store_closed = False
        if state.loads_in_flight == 0:
            self._release(state)
            if self._outbox.withdraw_release(state.id):
                self._link.send(Step(releases=(state.id,)))  # before the new lookup, not at the step's end
            self._ask(state)

    def _prepare_keys(self, state: RequestState) -> bool:
        """Root and keys of all full chunks known now; False when the request cannot be cached."""
        if self._arena is None or not state.cacheable:
            return False
        if not state.root:
            root = self._root(state.request)
            if root is None:
                state.cacheable = False
                return False
            state.root = root
        chunk = self._config.chunk_tokens
        state.extend_keys(state.request.num_tokens // chunk, chunk)
        return True

    def _root(self, request: Request) -> bytes | None:
        assert self._arena is not None
        name = revision = ""
        if request.lora_request is not None:
            found = self._adapters.revision(request.lora_request)
            if found is None:
                return None
            name, revision = request.lora_request.lora_name, found
        return root_key(
            self._arena.fingerprint, lora=name, lora_revision=revision, salt=request.cache_salt or ""
        )

    def _await_first_answer(self, state: RequestState) -> None:
        if state.waited or state.asked_at is None or state.answered_at is not None:
            return
        state.waited = True
        deadline = self._clock() + ANSWER_WAIT
        while state.answered_at is None and (left := deadline - self._clock()) > 0:
            if not self._link.wait(left):
                return
            self._pump()

    def _awaiting(self, state: RequestState) -> bool:
        """Whether an Answer is still to come that is worth waiting for."""
        if state.asked_at is None:
            return False
        since = self._clock() - state.asked_at
        if state.answered_at is None:
            return since < ANSWER_DEADLINE
        return state.pending and since < PENDING_DEADLINE

    def _release(self, state: RequestState) -> None:
        if state.leased:
            self._outbox.releases.append(state.id)
        state.leased = state.pending = False
        state.asked_at, state.refs, state.tiers = None, (), b""

    # ---- stores and records of a step

    def _note_member(
        self, record: StepRecord, state: RequestState, scheduled: int, loads: list[Piece]
    ) -> None:
        request = state.request
        start, end = request.num_computed_tokens, request.num_computed_tokens + scheduled
        record.members.append(state)
        record.spans.append((start, end))
        state.steps_in_flight += 1
        if state.scheduled_at is None:
            state.scheduled_at = record.began
            loaded = sum(state.hit_tokens.values())
            if start > loaded:
                state.hit_tokens[Tier.GPU] = start - loaded
        if loads:
            record.loads[state.id] = state
            state.loads_in_flight += 1
        if not state.recorded and end >= request.num_prompt_tokens:
            record.prefilled.append(state)

    def _plan_stores(
        self, output: SchedulerOutput, record: StepRecord, state: RequestState, scheduled: int
    ) -> list[Piece]:
        """Chunks of real tokens that are computed when this step ends."""
        request, chunk = state.request, self._config.chunk_tokens
        end = min(request.num_computed_tokens + scheduled, request.num_tokens)
        full = end // chunk
        storing = self._enabled and not state.store_closed and full > state.stored_chunks
        if storing and self._prepare_keys(state):
            table = self._table(output, record, state)
            wanted = Wanted(
                request=state.id,
                root=state.root,
                keys=state.keys[:full],
                start=state.stored_chunks,
                pages=table,
                blocks_per_chunk=self._config.blocks_per_chunk,
                tags=state.tags,
            )
            planned = self._ledger.plan(wanted)
            state.stored_chunks, state.store_closed = planned.start, planned.closed
            return planned.pieces
        if state.id in record.loads or (record.prefilled and record.prefilled[-1] is state):
            self._table(output, record, state)
        return []

    def _table(self, output: SchedulerOutput, record: StepRecord, state: RequestState) -> tuple[int, ...]:
        """The request's pages; remembered, to tell later whether a load error touched it."""
        assert output.kv_connector_block_state is not None
        groups = output.kv_connector_block_state.get_block_ids(state.id)
        table = tuple(groups[0]) if groups else ()
        record.tables[state.id] = table
        return table

    def _remember(self, record: StepRecord) -> None:
        self._records[record.step] = record
        while len(self._records) > MAX_STEPS:
            _, lost = self._records.popitem(last=False)
            self._leave(lost)

    def _forget_lost_steps(self, reported: int) -> None:
        for step in [number for number in self._records if number < reported - MAX_STEPS]:
            self._leave(self._records.pop(step))

    def _note_failures(
        self, record: StepRecord | None, invalid: set[int], failed_keys: frozenset[bytes]
    ) -> None:
        """Whatever a failed load touched is not committed, and its keys are not offered again."""
        if failed_keys:
            self._ledger.known.discard(failed_keys)
            self._outbox.bad_keys += failed_keys
        if not invalid:
            return
        tables = record.tables if record is not None else {}
        touched = {request for request, table in tables.items() if not invalid.isdisjoint(table)}
        self._ledger.spoil(touched)
        for request_id in touched:
            if (state := self._states.get(request_id)) is not None:
                state.failed_load = True
                state.bad_keys |= failed_keys
                state.stored_chunks = 0
        if record is not None:
            record.prefilled = [state for state in record.prefilled if state.id not in touched]
            record.spans = []

    def _close_record(self, record: StepRecord, report: StepReport) -> None:
        now = self._clock()
        began = max(record.began, self._last_report)
        self._last_report = now
        for state in record.loads.values():
            state.load_seconds += report.load_seconds
        for state in record.prefilled:
            if not state.recorded:
                state.recorded = True
                self._outbox.records.append(self._request_record(state, now))
        if not record.loads and any(end - start > 1 for start, end in record.spans):
            self._meter.observe(record.spans, now - began)
        self._leave(record)

    def _leave(self, record: StepRecord) -> None:
        """The step is over for its requests: leases of its loads end."""
        for state in record.loads.values():
            state.loads_in_flight -= 1
            if state.loads_in_flight == 0:
                self._release(state)
        for state in record.members:
            state.steps_in_flight -= 1
            self._drop_if_over(state)

    def _drop_if_over(self, state: RequestState) -> None:
        if not state.finished or state.steps_in_flight:
            return
        self._release(state)
        if self._states.get(state.id) is state:
            del self._states[state.id]

    def _request_record(self, state: RequestState, now: float) -> RequestRecord:
        request, chunk = state.request, self._config.chunk_tokens
        full = request.num_prompt_tokens // chunk
        scheduled = state.scheduled_at if state.scheduled_at is not None else now
        return RequestRecord(
            request=router_request_id(state.id),
            prompt_tokens=request.num_prompt_tokens,
            last_chunk_key=state.keys[full - 1] if 0 < full <= len(state.keys) else b"",
            hit_tokens={int(tier): tokens for tier, tokens in state.hit_tokens.items()},
            arrived=state.arrived_unix,
            lookup_seconds=state.lookup_seconds,
            wait_seconds=scheduled - state.arrived,
            load_seconds=state.load_seconds,
            prefill_seconds=now - scheduled,
            failed_load=state.failed_load,
        )

    # ---- messages

    def _flush(self) -> None:
        """At most one message per step, only if something is in it."""
        if not self._connected:
            self._outbox.clear()
            return
        step = self._outbox.take(self._changed_load())
        if step is not None:
            self._link.send(step)

    def _changed_load(self) -> EngineLoad | None:
        now, states = self._clock(), self._states.values()
        if not self._pacer.wanted(now, idle=all(state.finished for state in states)):
            return None
        load = engine_load(states, self._config.chunk_tokens, self._space(), self._meter.model())
        return load if self._pacer.sent(load, now) else None

    def _space(self) -> KvSpace:
        total = self._config.num_blocks * self._config.block_tokens
        return KvSpace(total, int(self.kv_used() * total))

    def _pump(self) -> None:
        for arrival in self._link.take():
            self._receive(arrival)

    def _receive(self, arrival: Arrival) -> None:
        match arrival.message:
            case Answer() as answer:
                self._answered(answer, arrival.at)
            case Grant(refs=refs):
                self._ledger.grant(refs)
            case Evicted(keys=joined):
                self._ledger.evicted(joined)
            case Arena() as arena:
                self._use_arena(arena)
            case Welcome() as welcome:
                self._forget_agent()
                self._connected = True
                self._enabled = not welcome.disabled
                if welcome.disabled:
                    logger.warning("Kvist stores nothing: %s", welcome.disabled)
            case Closed():
                self._forget_agent()
            case _:
                logger.debug("unexpected message %s", type(arrival.message).__name__)

    def _answered(self, answer: Answer, at: float) -> None:
        state = self._states.get(answer.request)
        if state is None or state.asked_at is None or state.root == b"":
            return  # it was scheduled without waiting; its leases have been released
        if state.answered_at is None:
            state.answered_at = at
            state.lookup_seconds = at - state.asked_at
        count = min(len(answer.refs), len(answer.tiers), len(state.keys))
        state.refs, state.tiers, state.pending = answer.refs[:count], answer.tiers[:count], answer.pending
        self._ledger.known.add(state.keys[: answer.known])

    def _use_arena(self, arena: Arena) -> None:
        before, self._arena = self._arena, arena
        changed = before is None or before.fingerprint != arena.fingerprint
        if before is not None and before.epoch != arena.epoch:
            self._ledger.reset()  # formatted anew on this connection: grants and answers are void
            for state in self._states.values():
                state.forget_agent()
        self._enabled = self._enabled and arena.geometry.slots > 0
        self._ledger.known.grow(4 * arena.geometry.slots)
        for state in self._states.values():
            if changed:
                state.root, state.keys = b"", []
            if state.scheduled_at is None and not state.finished and state.asked_at is None:
                self._ask(state)

    def _forget_agent(self) -> None:
        """Grants, answers and leases end with the connection; running requests go on uncached."""
        self._connected = self._enabled = False
        self._arena = None
        self._ledger.reset()
        self._outbox.clear()
        self._pacer.reset()
        for state in self._states.values():
            state.forget_agent()
