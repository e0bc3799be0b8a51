"""The agent's decisions on engine messages: everything that changes state goes through here.

One loop, no locks. Byte work (disk, checksums) is started by `loads` and `writebehind`, which
call back on the loop. `http`, `feed` and `metrics` read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from kvist_connector import __version__
from kvist_connector.agent.authority import Authority
from kvist_connector.agent.catalog import Catalog
from kvist_connector.agent.layouts import Step as Verdict
from kvist_connector.agent.layouts import judge
from kvist_connector.agent.loads import Loader
from kvist_connector.agent.members import Members
from kvist_connector.agent.memory import MemoryTier
from kvist_connector.agent.quota import Quotas
from kvist_connector.agent.session import Session
from kvist_connector.errors import ConfigError
from kvist_connector.keys import split_keys
from kvist_connector.planner import PrefillModel
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.engine import (
    PROTOCOL_VERSION,
    Arena,
    Commit,
    EngineLoad,
    Evicted,
    Geometry,
    Layout,
)
from kvist_connector.protocol.tiers import Tier

log = logging.getLogger(__name__)

DISABLED = "memory is 0: this agent keeps an index only, nothing is stored"
_EVICTED_BATCH = 65536
MAX_SESSIONS = 256


@dataclass
class Hooks:
    """Who else hears of engine messages; set by the composition root."""

    committed: Callable[[bytes], None] = lambda key: None
    record: Callable[[wire.RequestRecord], None] = lambda record: None
    load: Callable[[EngineLoad], None] = lambda load: None
    engine: Callable[[str], None] = lambda engine: None  # a scheduler half of this engine id arrived
    layout: Callable[[Layout], None] = lambda layout: None  # fingerprint or epoch changed
    forgotten: Callable[[], None] = lambda: None  # Reset: drop what lower tiers hold
    connections: Callable[[], None] = lambda: None  # one came or went
    gone: Callable[[list[bytes]], None] = lambda keys: None  # chunks are in no tier any more


@dataclass
class Core:
    """State and rules of one agent. Built by `agent.app`."""

    memory: MemoryTier
    catalog: Catalog
    loader: Loader
    members: Members
    epoch: int
    quiet: Callable[[], Awaitable[None]]  # returns when no thread touches the arena
    quotas: Quotas
    hooks: Hooks = field(default_factory=Hooks)
    counts: Counter[str] = field(default_factory=Counter)
    sessions: set[Session] = field(default_factory=set)
    engine_load: EngineLoad = field(default_factory=EngineLoad)
    draining: bool = False  # see drain.py
    # Why chunks of a layout cannot be stored in some tier; empty when they can.
    unstorable: Callable[[Layout], str] = lambda layout: ""
    # The layout as this agent announces it.
    announced: Callable[[Layout], Layout] = lambda layout: layout

    def __post_init__(self) -> None:
        self._evicted: list[bytes] = []
        self._formatting: set[asyncio.Task[None]] = set()
        self.catalog.on_gone = self._gone_key

    @property
    def authority(self) -> Authority:
        """What is retired."""
        return self.memory.authority

    @property
    def schedulers(self) -> list[Session]:
        """Connected scheduler halves."""
        return [session for session in self.sessions if session.is_scheduler]

    @property
    def prefill(self) -> PrefillModel | None:
        """The engine's measured prefill speed, None until it has one."""
        load = self.engine_load
        if load.prefill_seconds_per_token <= 0:
            return None
        return PrefillModel(load.prefill_seconds_per_token, load.prefill_seconds_per_token2)

    def room_changed(self) -> None:
        """Slots became free, or leases ended."""
        self.loader.room_changed()
        self._grant_all()

    # ---- connections

    def open(self, session: Session, hello: wire.Hello) -> None:
        """Welcome, and everything the peer can already have."""
        if hello.protocol != PROTOCOL_VERSION:
            session.refuse(
                f"protocol {hello.protocol} is not {PROTOCOL_VERSION}: install the same version of kvist "
                "for engine and agent"
            )
            return
        if len(self.sessions) >= MAX_SESSIONS:
            session.refuse(f"{MAX_SESSIONS} connections are open already: is an engine leaking them?")
            return
        self.sessions.add(session)
        self.hooks.connections()
        disabled = "" if self.memory.enabled else DISABLED
        session.send(
            wire.Welcome(protocol=PROTOCOL_VERSION, epoch=self.epoch, agent=__version__, disabled=disabled)
        )
        if session.is_scheduler:
            self._send_arena(session)
            self._tell_retired(session)
            self._grant(session)
            self.hooks.engine(hello.engine)
        else:
            self.members.connected(session)

    def gone(self, session: Session) -> None:
        """Leases end, unfilled slots go to quarantine."""
        if session not in self.sessions:
            return
        self.sessions.discard(session)
        self.members.disconnected(session)
        self.loader.abandon(session)
        session.leases.release_all()
        self.memory.quarantine(session.grants.give_up(), self.members.living())
        self.members.settle()
        self.room_changed()
        self.hooks.connections()

    def handle(self, session: Session, message: object) -> None:
        """One message after Hello."""
        match message:
            case wire.Step() if session.is_scheduler:
                self._step(session, message)
            case wire.Lookup() if session.is_scheduler:
                self.counts["lookups"] += 1
                tags = self.quotas.learn(message.tags)
                if tags != message.tags:
                    message = msgspec.structs.replace(message, tags=tags)
                self.loader.lookup(session, message, self.prefill)
            case wire.Reset() if session.is_scheduler:
                self._reset()
            case wire.Register() if not session.is_scheduler:
                self._register(session, message.layout)
            case wire.Quiesced() if not session.is_scheduler:
                self.members.quiesced(session.member, message.ticket)
                self.room_changed()
            case _:
                raise ValueError(f"{type(message).__name__} is not valid on a {session.hello!r} connection")

    # ---- layouts

    def _register(self, session: Session, offered: Layout) -> None:
        layout = self.announced(offered)
        users = self.members.users(session, self.sessions)
        verdict = judge(self.memory.layout, layout, users, self.memory.size)
        problem = self.unstorable(layout) if self.memory.enabled else ""
        if verdict.step is Verdict.REFUSE or problem:
            session.refuse(problem or verdict.reason)
            return
        if verdict.step is Verdict.FORMAT and self.memory.layout is not None:
            # Threads may still copy between disk and the old slots; only formatting waits for them.
            task = asyncio.get_running_loop().create_task(self._format_when_quiet(session, layout))
            self._formatting.add(task)
            task.add_done_callback(self._formatting.discard)
            return
        self._accept_with(session, layout, verdict.step)

    async def _format_when_quiet(self, session: Session, layout: Layout) -> None:
        await self.quiet()
        users = self.members.users(session, self.sessions)
        verdict = judge(self.memory.layout, layout, users, self.memory.size)
        if verdict.step is Verdict.REFUSE:
            session.refuse(verdict.reason)
            return
        self._accept_with(session, layout, verdict.step)

    def _accept_with(self, session: Session, layout: Layout, step: Verdict) -> None:
        try:
            if step is Verdict.FORMAT:
                self._format(layout)
        except ConfigError as error:
            session.refuse(str(error))
        else:
            self._accept(session)

    def _format(self, layout: Layout) -> None:
        for other in self.sessions:
            other.grants.give_up()
            other.leases.release_all()
        self.epoch += 1
        self.memory.format(layout, self.epoch)
        log.info("layout of %s: %s", layout.model, self.memory.geometry)
        self.hooks.layout(layout)
        for scheduler in self.schedulers:
            self._send_arena(scheduler)
            self._grant(scheduler)

    def _accept(self, session: Session) -> None:
        session.registered = True
        self._send_arena(session)

    def _send_arena(self, session: Session) -> None:
        layout, geometry = self.memory.layout, self.memory.geometry
        if layout is None or geometry is None:
            return
        session.send(
            Arena(
                path=str(self.members.arena) if self.memory.enabled else "",
                geometry=geometry,
                epoch=self.epoch,
                fingerprint=layout.fingerprint,
            )
        )

    # ---- steps

    def _step(self, session: Session, step: wire.Step) -> None:
        for commit in step.commits:
            self._commit(session, commit)
        for ref in step.discards:
            if session.grants.take(ref):
                self.memory.discard(ref)
        for request in step.releases:
            self.loader.release(session, request)
        for key in split_keys(step.bad_keys):
            self._drop_bad(key)
        for record in step.records:
            self._count_record(record)
            self.catalog.prompt_ended(record.last_chunk_key)
            self.hooks.record(record)
        for answer in step.answers:
            self.catalog.answer_ended(answer.last_chunk_key, answer.tokens)
        if step.load is not None:
            self.engine_load = step.load
            self.hooks.load(step.load)
        self.room_changed()

    def _commit(self, session: Session, commit: Commit) -> None:
        if not session.grants.take(commit.ref) or not self.memory.owns(commit.ref):
            self.counts["commits_refused"] += 1
            return
        tags = self.quotas.learn(commit.tags)
        if tags != commit.tags:
            commit = msgspec.structs.replace(commit, tags=tags)
        outcome = self._judge_commit(commit)
        self.counts["commits_" + outcome] += 1
        if outcome != "accepted":
            self.memory.discard(commit.ref)
            if outcome in ("orphaned", "retired", "over_quota"):
                self._gone_key(commit.key)
            present = self.catalog.get(commit.key)
            if present is not None:
                self.memory.tag(present, commit.tags)
            return
        chunk = self.memory.commit(
            commit.ref, commit.key, commit.parent, commit.index, commit.tags, commit.epoch
        )
        self.quotas.stored(chunk)
        self.hooks.committed(commit.key)

    def _judge_commit(self, commit: Commit) -> str:
        if len(commit.key) != 16 or len(commit.parent) != 16:
            raise ValueError("a commit's key and parent have 16 bytes each")
        if self.catalog.resident(commit.key) is not None or self.loader.is_loading(commit.key):
            return "duplicate"
        if self.memory.authority.retires(commit.key, commit.parent, commit.index, commit.epoch, commit.tags):
            return "retired"
        if not self.quotas.admit(commit.tags):
            return "over_quota"
        if commit.index > 0:
            parent = self.catalog.get(commit.parent)
            if parent is None or parent.index != commit.index - 1:
                return "orphaned"
        return "accepted"

    def _count_record(self, record: wire.RequestRecord) -> None:
        self.counts["requests"] += 1
        for tier, tokens in record.hit_tokens.items():
            self.counts[f"hit_tokens_{Tier(tier).label}"] += tokens

    def _drop_bad(self, key: bytes) -> None:
        chunk = self.catalog.resident(key)
        if chunk is not None:
            self.counts["bad_chunks"] += 1
            self.memory.drop(chunk)

    def _reset(self) -> None:
        self.memory.forget()
        self.hooks.forgotten()
        self.room_changed()

    # ---- pushes

    def _grant_all(self) -> None:
        for session in self.schedulers:
            self._grant(session)

    def _grant(self, session: Session) -> None:
        refs = session.grants.refill()
        if refs:
            session.send(wire.Grant(refs=refs))

    def tell_retired(self) -> None:
        """The epoch of retirement has grown."""
        for session in self.schedulers:
            self._tell_retired(session)

    def _tell_retired(self, session: Session) -> None:
        if self.authority.known.epoch:
            session.send(wire.Retired(epoch=self.authority.known.epoch))

    def _gone_key(self, key: bytes) -> None:
        if not self._evicted:
            asyncio.get_running_loop().call_soon(self._send_evicted)
        self._evicted.append(key)

    def _send_evicted(self) -> None:
        keys = [key for key in self._evicted if self.catalog.get(key) is None]
        self._evicted.clear()
        self.hooks.gone(keys)
        for start in range(0, len(keys), _EVICTED_BATCH):
            message = Evicted(keys=b"".join(keys[start : start + _EVICTED_BATCH]))
            for session in self.schedulers:
                session.send(message)

    def geometry(self) -> Geometry | None:
        """The arena's geometry, for status."""
        return self.memory.geometry

    def stored_bytes(self, tier: Tier) -> int:
        """Bytes of chunks in a tier."""
        return self.catalog.index(tier).bytes
