"""Asking the agent what it has of a request, and the leases that come with the answer. Torch-free.

Used by the scheduler half, on its thread. One Lookup per request and connection; a preempted
request asks anew. A lease ends when the step that loaded has been reported, or when the
engine decided to load nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kvist_connector.engines.inbox import Arrival
from kvist_connector.engines.vllm.config import EngineConfig
from kvist_connector.engines.vllm.lora import AdapterRevisions
from kvist_connector.engines.vllm.outbox import Outbox
from kvist_connector.engines.vllm.requests import RequestState
from kvist_connector.keys import root_key
from kvist_connector.names import TAG_LORA
from kvist_connector.protocol.engine import Answer, Arena, Lookup, Step, ToAgent

if TYPE_CHECKING:
    from vllm.v1.request import Request

ANSWER_WAIT = 0.002  # seconds a request's first match call may wait for its Answer
ANSWER_DEADLINE = 0.25  # after that an agent that has not answered at all is not waited for
SILENCE = 1.0  # an agent that has answered nothing for so long, though asked, hangs: nobody waits for it
PENDING_DEADLINE = 30.0  # backstop; the agent answers pending lookups by its own shorter deadline


class Link(Protocol):
    """The connection as the scheduler half sees it."""

    def send(self, message: ToAgent) -> bool: ...
    def take(self) -> list[Arrival]: ...
    def wait(self, seconds: float) -> bool: ...


class Lookups:
    """`arena` and `enabled` are what the agent last said; the owner sets them."""

    def __init__(self, config: EngineConfig, link: Link, outbox: Outbox, clock: Callable[[], float]) -> None:
        self._chunk = config.chunk_tokens
        self._link = link
        self._outbox = outbox
        self._clock = clock
        self._adapters = AdapterRevisions(config.extra.lora_revisions)
        self._arena: Arena | None = None
        self.enabled = False
        self._unheard: float | None = None  # when it was asked first since its last answer

    @property
    def arena(self) -> Arena | None:
        """What the agent of this moment said first."""
        return self._arena

    @arena.setter
    def arena(self, arena: Arena | None) -> None:
        self._arena, self._unheard = arena, None

    @property
    def silent(self) -> bool:
        """Whether the agent hangs; it is asked on, and its next answer ends that."""
        return self._unheard is not None and self._clock() - self._unheard > SILENCE

    def ask(self, state: RequestState) -> None:
        """Send the lookup, if there is somebody to ask and something to ask for."""
        if not self.prepare_keys(state) or not self.enabled or not state.keys:
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
            self._unheard = state.asked_at if self._unheard is None else self._unheard
            state.refs, state.tiers = (), b""
            state.waited, state.pending, state.leased = False, False, True

    def ask_after_preemption(self, state: RequestState) -> None:
        """A preempted request matches anew, with what it decoded; its old leases are gone."""
        if state.preemptions == state.request.num_preemptions:
            return
        state.preemptions = state.request.num_preemptions
        state.store_closed = False
        if state.loads_in_flight == 0:
            self.release(state)
            if self._outbox.withdraw_release(state.id):
                self._link.send(Step(releases=(state.id,)))  # before the new lookup, not at the step's end
            self.ask(state)

    def prepare_keys(self, state: RequestState) -> bool:
        """Root and keys of all full chunks known now; False when the request cannot be cached."""
        if self.arena is None or not state.cacheable:
            return False
        if not state.root:
            root = self._root(self.arena, state.request)
            if root is None:
                state.cacheable = False
                return False
            state.root = root
        state.extend_keys(state.request.num_tokens // self._chunk, self._chunk)
        return True

    def await_first_answer(self, state: RequestState, receive: Callable[[], None]) -> None:
        """Wait a moment, once per lookup; `receive` takes what has arrived."""
        if state.waited or state.asked_at is None or state.answered_at is not None or self.silent:
            return
        state.waited = True
        deadline = self._clock() + ANSWER_WAIT
        while state.answered_at is None and (left := deadline - self._clock()) > 0:
            if not self._link.wait(left):
                return
            receive()

    def awaiting(self, state: RequestState) -> bool:
        """Whether an Answer is still to come that is worth waiting for."""
        if state.asked_at is None or self.silent:
            return False
        since = self._clock() - state.asked_at
        if state.answered_at is None:
            return since < ANSWER_DEADLINE
        return state.pending and since < PENDING_DEADLINE

    def answered(self, state: RequestState | None, answer: Answer, at: float) -> None:
        """Note an Answer; one whose request was scheduled without waiting is void."""
        self._unheard = None
        if state is None or state.asked_at is None or state.root == b"":
            return
        if state.answered_at is None:
            state.answered_at = at
            state.lookup_seconds = at - state.asked_at
        count = min(len(answer.refs), len(answer.tiers), len(state.keys))
        state.refs, state.tiers, state.pending = answer.refs[:count], answer.tiers[:count], answer.pending

    def release(self, state: RequestState) -> None:
        """Leases of the request end with the step's message."""
        if state.leased:
            self._outbox.releases.append(state.id)
        state.leased = state.pending = False
        state.asked_at, state.refs, state.tiers = None, (), b""

    def adapter_tags(self, request: Request) -> tuple[str, ...]:
        """Tags by which the chunks of an adapter, or of one revision of it, can be retired."""
        if request.lora_request is None:
            return ()
        name, revision = request.lora_request.lora_name, self._adapters.revision(request.lora_request)
        return f"{TAG_LORA}{name}", f"{TAG_LORA}{name}@{revision or ''}"

    def _root(self, arena: Arena, request: Request) -> bytes | None:
        name = revision = ""
        if request.lora_request is not None:
            found = self._adapters.revision(request.lora_request)
            if found is None:
                return None
            name, revision = request.lora_request.lora_name, found
        return root_key(arena.fingerprint, lora=name, lora_revision=revision, salt=request.cache_salt or "")
