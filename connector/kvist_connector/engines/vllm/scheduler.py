"""The scheduler half: decides what is loaded and stored, and what counts. Torch-free.

Called by connector.py from vLLM's scheduler, always on one thread; agent messages are
taken from a link at every hook. It never raises for the cache's sake and never waits
longer than lookups.ANSWER_WAIT once per request.

Steps overlap under async scheduling: a step's plan, its report and what it may commit
belong together by the step's number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvist_connector.engines.inbox import Arrival, Closed
from kvist_connector.engines.vllm.accepted import LastAccepted
from kvist_connector.engines.vllm.config import EngineConfig
from kvist_connector.engines.vllm.decoded import DecodedReuse
from kvist_connector.engines.vllm.load_report import KvSpace, LoadPacer, engine_load
from kvist_connector.engines.vllm.lookups import Link, Lookups
from kvist_connector.engines.vllm.metadata import StepPlan, StepReport
from kvist_connector.engines.vllm.outbox import Outbox
from kvist_connector.engines.vllm.prefill_meter import PrefillMeter
from kvist_connector.engines.vllm.requests import (
    RequestState,
    hits_by_tier,
    is_cacheable,
    load_pieces,
    loadable_tokens,
    tags_of,
)
from kvist_connector.engines.vllm.steps import StepRecord, StepRecords, answer_record, request_record
from kvist_connector.engines.vllm.stores import StoreLedger, Wanted
from kvist_connector.protocol.engine import (
    Answer,
    Arena,
    EngineLoad,
    Evicted,
    Grant,
    Reset,
    Retired,
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

PUSH_WORK_DEADLINE = 1.0  # seconds the engine is kept stepping for stores under way


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
        self._connected = False
        self._states: dict[str, RequestState] = {}
        self._loads: dict[str, list[Piece]] = {}
        self._ledger = StoreLedger(config.ranks)
        self._records = StepRecords()
        self._step = 0
        self._outbox = Outbox()
        self._lookups = Lookups(config, link, self._outbox, clock)
        self._meter = PrefillMeter()
        self._pacer = LoadPacer()
        self._accepted = LastAccepted()
        self._decoded = DecodedReuse(config.extra.decoded_reuse, config.chunk_tokens)
        self._last_report = 0.0
        self._last_store = float("-inf")
        self.retired = self._forgotten = 0  # epochs: what the agent said, what the engine's cache was told
        self.kv_used: Callable[[], float] = lambda: 0.0
        self.forget_cached: Callable[[], None] = lambda: None

    # ---- hooks of a request

    def new_request(self, request: Request) -> None:
        """Look the prompt up; the answer is waited for when the engine asks."""
        state = RequestState(request, is_cacheable(request), tags_of(request), self._clock(), self._wall())
        self._states[request.request_id] = state
        self._accepted.note(state.id)
        self.poll()
        self._forget_retired()
        state.tags += self._lookups.adapter_tags(request)
        state.epoch = self.retired
        self._lookups.ask(state)
        if state.keys:
            self._decoded.asked(state.root, state.keys, request.prompt_token_ids or ())

    def matched_tokens(self, request: Request, local_tokens: int) -> int | None:
        """Tokens to load after the engine's own hit; None: ask again."""
        state = self._states.get(request.request_id)
        if state is None:
            return 0
        self.poll()
        self._lookups.ask_after_preemption(state)
        self._lookups.await_first_answer(state, self.poll)
        if self._lookups.awaiting(state):
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
            self._lookups.release(state)
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
        self.poll()
        self._forget_retired()
        self._step += 1
        for request_id in output.preempted_req_ids or ():
            if (state := self._states.get(request_id)) is not None:
                self._lookups.ask_after_preemption(state)
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
            for lost in self._records.add(record):
                self._leave(lost)
        else:
            self._flush()
        if stores:
            self._last_store = record.began
        epoch = self._lookups.arena.epoch if self._lookups.arena is not None else 0
        return StepPlan(record.step, epoch, tuple(loads), tuple(stores), reporting)

    def step_done(self, output: KVConnectorOutput) -> None:
        """What the workers report of a step: commits, releases, records; one message to the agent."""
        self.poll()
        report = output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            record = self._records.take(report.step)
            self._note_failures(record, set(output.invalid_block_ids or ()), report.failed_keys)
            self._ledger.answer(report.filled, report.unfilled)
            commits, discards = self._ledger.settle()
            self._outbox.commits += commits
            self._outbox.discards += discards
            if record is not None:
                self._close_record(record, report)
            for lost in self._records.take_lost(report.step):
                self._leave(lost)
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
        self.poll()
        self._ledger.known.clear()
        for state in self._states.values():
            state.refs, state.stored_chunks = (), 0
        return self._link.send(Reset()) or not self._connected

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
        full = self._stored_tokens(state, end) // chunk
        storing = self._lookups.enabled and not state.store_closed and full > state.stored_chunks
        if storing and self._lookups.prepare_keys(state):
            table = self._table(output, record, state)
            wanted = Wanted(
                request=state.id,
                root=state.root,
                keys=state.keys[:full],
                start=state.stored_chunks,
                pages=table,
                blocks_per_chunk=self._config.blocks_per_chunk,
                tags=state.tags,
                epoch=state.epoch,
            )
            planned = self._ledger.plan(wanted)
            state.stored_chunks, state.store_closed = planned.start, planned.closed
            return planned.pieces
        if state.id in record.loads or (record.prefilled and record.prefilled[-1] is state):
            self._table(output, record, state)
        return []

    def _stored_tokens(self, state: RequestState, end: int) -> int:
        """Of those until `end`, the tokens that are stored: of the answer while answers are found again."""
        prompt = state.request.num_prompt_tokens
        first = prompt // self._config.chunk_tokens  # the first chunk with tokens of the answer
        if end // self._config.chunk_tokens <= first:
            return end
        if not state.answer_noted and self._lookups.prepare_keys(state):
            state.answer_noted = True
            self._decoded.answered(state.root, state.keys, state.request.prompt_token_ids or ())
        return end if self._decoded.admits else prompt

    def _table(self, output: SchedulerOutput, record: StepRecord, state: RequestState) -> tuple[int, ...]:
        """The request's pages; remembered, to tell later whether a load error touched it."""
        assert output.kv_connector_block_state is not None
        groups = output.kv_connector_block_state.get_block_ids(state.id)
        table = tuple(groups[0]) if groups else ()
        record.tables[state.id] = table
        return table

    def _note_failures(
        self, record: StepRecord | None, invalid: set[int], failed_keys: frozenset[bytes]
    ) -> None:
        """Whatever a failed load touched is not committed, and its keys are not offered again."""
        if failed_keys:
            self._ledger.known.discard(failed_keys)
            self._outbox.bad_keys += failed_keys
        if not invalid:
            return
        touched = record.touched(invalid) if record is not None else set()
        self._ledger.spoil(touched)
        for request_id in touched:
            if (state := self._states.get(request_id)) is not None:
                state.failed_load = True
                state.bad_keys |= failed_keys
                state.stored_chunks = 0
        if record is not None:
            record.spoil(touched)

    def _close_record(self, record: StepRecord, report: StepReport) -> None:
        now = self._clock()
        began = max(record.began, self._last_report)
        self._last_report = now
        for state in record.loads.values():
            state.load_seconds += report.load_seconds
        for state in record.prefilled:
            if not state.recorded:
                state.recorded = True
                self._outbox.records.append(request_record(state, now, self._config.chunk_tokens))
        if not record.loads and any(end - start > 1 for start, end in record.spans):
            self._meter.observe(record.spans, now - began)
        self._leave(record)

    def _leave(self, record: StepRecord) -> None:
        """The step is over for its requests: leases of its loads end."""
        for state in record.loads.values():
            state.loads_in_flight -= 1
            if state.loads_in_flight == 0:
                self._lookups.release(state)
        for state in record.members:
            state.steps_in_flight -= 1
            self._drop_if_over(state)

    def _drop_if_over(self, state: RequestState) -> None:
        if not state.finished or state.steps_in_flight:
            return
        self._lookups.release(state)
        if self._states.get(state.id) is state:
            del self._states[state.id]
            answer = answer_record(state, self._config.chunk_tokens)
            if answer is not None:
                self._outbox.answers.append(answer)

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
        load = engine_load(
            states, self._config.chunk_tokens, self._space(), self._meter.model(), self._accepted.by_router()
        )
        load = replace(load, decoded_reuse=round(self._decoded.share, 2))
        return load if self._pacer.sent(load, now) else None

    def _space(self) -> KvSpace:
        total = self._config.num_blocks * self._config.block_tokens
        return KvSpace(total, int(self.kv_used() * total))

    def poll(self) -> None:
        """Take what the agent has said; every hook does."""
        for arrival in self._link.take():
            self._receive(arrival)

    @property
    def ready(self) -> bool:
        """Whether the agent is connected and has granted slots."""
        return self._lookups.enabled and self._ledger.granted > 0

    @property
    def live_requests(self) -> int:
        """Requests that something is remembered of."""
        return len(self._states)

    def _receive(self, arrival: Arrival) -> None:
        match arrival.message:
            case Answer() as answer:
                self._answered(answer, arrival.at)
            case Grant(refs=refs):
                self._ledger.grant(refs)
            case Evicted(keys=joined):
                self._ledger.evicted(joined)
            case Retired(epoch=epoch):
                self.retired = max(self.retired, epoch)
            case Arena() as arena:
                self._use_arena(arena)
            case Welcome() as welcome:
                self._forget_agent()
                self._connected = True
                self._lookups.enabled = not welcome.disabled
                if welcome.disabled:
                    logger.warning("Kvist stores nothing: %s", welcome.disabled)
            case Closed():
                self._forget_agent()
            case _:
                logger.debug("unexpected message %s", type(arrival.message).__name__)

    def _forget_retired(self) -> None:
        """The engine's own prefix cache forgets all it holds; only between the decisions of a step."""
        if self._forgotten < self.retired:
            self._forgotten = self.retired
            self.forget_cached()

    def _answered(self, answer: Answer, at: float) -> None:
        state = self._states.get(answer.request)
        self._lookups.answered(state, answer, at)
        if state is not None and state.answered_at is not None:
            self._ledger.known.add(state.keys[: answer.known])

    def _use_arena(self, arena: Arena) -> None:
        before, self._lookups.arena = self._lookups.arena, arena
        changed = before is None or before.fingerprint != arena.fingerprint
        if before is not None and before.epoch != arena.epoch:
            self._ledger.reset()  # formatted anew on this connection: grants and answers are void
            for state in self._states.values():
                state.forget_agent()
        slots, chunk = arena.geometry.slots, arena.geometry.chunk_tokens
        self._lookups.enabled = self._lookups.enabled and slots > 0
        if slots:
            logger.info(
                "Kvist agent ready: memory for %d tokens in %d chunks, %s", slots * chunk, slots, arena.path
            )
        self._ledger.known.grow(4 * slots)
        for state in self._states.values():
            if changed:
                state.root, state.keys = b"", []
            if state.scheduled_at is None and not state.finished and state.asked_at is None:
                self._lookups.ask(state)

    def _forget_agent(self) -> None:
        """Grants, answers and leases end with the connection; running requests go on uncached."""
        self._connected = self._lookups.enabled = False
        self._lookups.arena = None
        self._ledger.reset()
        self._outbox.clear()
        self._pacer.reset()
        for state in self._states.values():
            state.forget_agent()
