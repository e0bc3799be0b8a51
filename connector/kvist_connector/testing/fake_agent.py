"""A small agent for tests of engine adapters: real socket, real arena file, no tiers, no eviction.

It speaks protocol/engine.py and keeps slots by the rules of docs/architecture.md, so an
adapter cannot tell it from the real one. Tests steer it: hold answers back, corrupt or
take away a slot, drop connections, restart with another epoch.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Iterable
from pathlib import Path

from kvist_connector.arena import geometry as layout
from kvist_connector.arena.headers import Headers, State
from kvist_connector.keys import split_keys
from kvist_connector.protocol.engine import (
    PROTOCOL_VERSION,
    Answer,
    Arena,
    Evicted,
    Geometry,
    Grant,
    Hello,
    Layout,
    Lookup,
    Quiesce,
    Quiesced,
    Refused,
    Register,
    Reset,
    SlotRef,
    Step,
    ToAgent,
    ToEngine,
    Welcome,
)
from kvist_connector.protocol.framing import FrameDecoder, encode
from kvist_connector.protocol.tiers import Tier


class FakeAgent:
    """Start, use, close. All public state may be read under `lock` or after `wait_for`."""

    def __init__(self, folder: Path, slots: int = 64, grant: int = 32, epoch: int = 1) -> None:
        self.socket_path = folder / "agent.sock"
        self.arena_path = folder / "agent.arena"
        self.slots = slots
        self.grant = grant
        self.epoch = epoch
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.messages: list[ToAgent] = []
        self.steps: list[Step] = []
        self.chunks: dict[bytes, SlotRef] = {}
        self.parents: dict[bytes, bytes] = {}
        self.bad_keys: list[bytes] = []
        self.answering = True
        self.pending = False
        self.disabled = ""
        self.tier = Tier.MEMORY
        self.geometry: Geometry | None = None
        self.layout: Layout | None = None
        self.headers: Headers | None = None
        self.data: mmap.mmap | None = None
        self._free: list[int] = []
        self._generation = epoch << 32
        self._granted: set[int] = set()
        self._quarantined: list[int] = []
        self._held: list[Lookup] = []
        self._connections: dict[socket.socket, str] = {}
        self._server: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    # ---- for tests

    def start(self) -> FakeAgent:
        """Listen."""
        self.socket_path.unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(self.socket_path))
        server.listen()
        self._server = server
        self._spawn(self._accept, server)
        return self

    def close(self) -> None:
        """Stop listening, drop everybody, forget nothing: `start` again is a restart."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown(socket.SHUT_RDWR)
            server.close()
        self.drop()
        for thread in self._threads:
            thread.join(10)
        self._threads.clear()

    def restart(self, keep: bool = True) -> None:
        """As after kill -9: with `keep`, committed chunks survive in the arena file."""
        self.close()
        with self.lock:
            self.epoch += 1
            self._generation = self.epoch << 32
            for slot in self._granted:
                assert self.headers is not None
                self.headers.write(slot, self._generation, State.QUARANTINE)
            self._quarantined += self._granted
            self._granted.clear()
            if not keep:
                self._quarantined.clear()
                self.chunks.clear()
                self.geometry = None
                self.arena_path.unlink(missing_ok=True)
        self.start()

    def drop(self) -> None:
        """Close every connection."""
        with self.lock:
            for connection in list(self._connections):
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def release_answers(self) -> None:
        """Answer what was held back, and everything from now on."""
        with self.lock:
            self.answering = True
            held, self._held = self._held, []
            for lookup in held:
                self._answer(lookup)

    def finish_pending(self) -> None:
        """Second answers, pending no more."""
        self.pending = False
        self.release_answers()

    def take_away(self, key: bytes) -> None:
        """Evict a chunk although it is leased: its slot gets a new generation."""
        with self.lock:
            ref = self.chunks.pop(key)
            assert self.headers is not None
            self._generation += 1
            self.headers.write(ref.slot, self._generation, State.FREE)
            self._free.append(ref.slot)

    def evict(self, keys: Iterable[bytes]) -> None:
        """As `take_away`, and say so."""
        gone = list(keys)
        for key in gone:
            self.take_away(key)
        self.push("scheduler", Evicted(keys=b"".join(gone)))

    def chunk_bytes(self, key: bytes, rank: int = 0) -> bytes:
        """What the arena holds for a key."""
        with self.lock:
            assert self.geometry is not None
            assert self.data is not None
            start = layout.slot_offset(self.geometry, rank, self.chunks[key].slot)
            return self.data[start : start + layout.slot_bytes(self.geometry)]

    def push(self, role: str, message: ToEngine) -> None:
        """Send to every connection of a role."""
        with self.lock:
            for connection, found in self._connections.items():
                if found == role:
                    connection.sendall(encode(message))

    def quiesce(self, ticket: int) -> None:
        """Ask the workers."""
        self.push("worker", Quiesce(ticket=ticket))

    def wait_for(self, condition: object, timeout: float = 20.0) -> None:
        """Until `condition()` holds; fails the test otherwise."""
        assert callable(condition)
        with self.changed:
            if not self.changed.wait_for(condition, timeout):
                raise AssertionError(f"not reached within {timeout} s")

    @property
    def roles(self) -> list[str]:
        """Who is connected."""
        return sorted(self._connections.values())

    def quiesced(self) -> list[int]:
        """Tickets answered."""
        return [message.ticket for message in self.messages if isinstance(message, Quiesced)]

    # ---- serving

    def _spawn(self, target: object, *arguments: object) -> None:
        assert callable(target)
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        decoder: FrameDecoder[ToAgent] = FrameDecoder(ToAgent)
        try:
            while data := connection.recv(1 << 18):
                for message in decoder.feed(data):
                    with self.changed:
                        self.messages.append(message)
                        self._handle(connection, message)
                        self.changed.notify_all()
        except OSError:
            pass
        with self.changed:
            role = self._connections.pop(connection, "")
            if role == "scheduler":
                self._quarantine()
            self.changed.notify_all()
        connection.close()

    def _handle(self, connection: socket.socket, message: ToAgent) -> None:
        match message:
            case Hello(role=role):
                self._connections[connection] = role
                welcome = Welcome(
                    protocol=PROTOCOL_VERSION, epoch=self.epoch, agent="fake", disabled=self.disabled
                )
                connection.sendall(encode(welcome))
                if role == "scheduler" and self.geometry is not None:
                    self._announce(connection)
                if role == "worker" and self._quarantined:
                    connection.sendall(encode(Quiesce(ticket=0)))
            case Register(layout=found):
                self._register(connection, found)
            case Lookup():
                self._held.append(message) if not self.answering else self._answer(message)
            case Step():
                self._step(message)
            case Reset():
                self.chunks.clear()
            case Quiesced():
                self._free += self._quarantined
                self._quarantined.clear()
                self._top_up_all()
            case _:
                pass

    def _register(self, connection: socket.socket, found: Layout) -> None:
        if self.layout is not None and found != self.layout:
            connection.sendall(encode(Refused(reason="layouts disagree")))
            connection.shutdown(socket.SHUT_RDWR)
            return
        self.layout = found
        created = self.geometry is None
        if created:
            self._create(found)
        connection.sendall(encode(self._arena()))
        if created:
            for other, role in self._connections.items():
                if role == "scheduler":
                    self._announce(other)

    def _create(self, found: Layout) -> None:
        self.geometry = g = Geometry(
            slots=self.slots,
            ranks=found.ranks,
            layers=found.layers,
            layer_bytes=found.layer_bytes,
            blocks=found.blocks,
            chunk_tokens=found.chunk_tokens,
        )
        with self.arena_path.open("w+b") as file:
            os.ftruncate(file.fileno(), layout.file_bytes(g))
            self.data = mmap.mmap(file.fileno(), layout.file_bytes(g))
        self.headers = Headers(self.data, g.slots)
        self.data[: layout.PAGE] = layout.pack_superblock(g, found.fingerprint, self.epoch).ljust(
            layout.PAGE, b"\0"
        )
        self._free = list(range(g.slots))

    def _arena(self) -> Arena:
        assert self.geometry is not None
        assert self.layout is not None
        return Arena(
            path=str(self.arena_path),
            geometry=self.geometry,
            epoch=self.epoch,
            fingerprint=self.layout.fingerprint,
        )

    def _announce(self, connection: socket.socket) -> None:
        connection.sendall(encode(self._arena()))
        self._top_up(connection)

    def _top_up(self, connection: socket.socket) -> None:
        refs = []
        while self._free and len(self._granted) < self.grant:
            slot = self._free.pop(0)
            self._generation += 1
            assert self.headers is not None
            self.headers.write(slot, self._generation, State.RESERVED)
            self._granted.add(slot)
            refs.append(SlotRef(slot, self._generation))
        if refs:
            connection.sendall(encode(Grant(refs=tuple(refs))))

    def _answer(self, lookup: Lookup) -> None:
        refs = []
        for key in split_keys(lookup.keys):
            if key not in self.chunks:
                break
            refs.append(self.chunks[key])
        answer = Answer(
            request=lookup.request,
            refs=tuple(refs),
            tiers=bytes([self.tier]) * len(refs),
            known=len(refs),
            pending=self.pending,
        )
        if self.pending:
            self._held.append(lookup)
        self.push("scheduler", answer)

    def _step(self, step: Step) -> None:
        self.steps.append(step)
        for commit in step.commits:
            self._commit(commit.ref, commit.key, commit.parent, commit.index)
        for ref in step.discards:
            self._granted.discard(ref.slot)
            self._free.append(ref.slot)
        for key in split_keys(step.bad_keys):
            self.bad_keys.append(key)
            if key in self.chunks:
                self.take_away(key)
        self._top_up_all()

    def _top_up_all(self) -> None:
        for connection, role in self._connections.items():
            if role == "scheduler" and self.geometry is not None:
                self._top_up(connection)

    def _commit(self, ref: SlotRef, key: bytes, parent: bytes, index: int) -> None:
        assert self.headers is not None
        if not self.headers.holds(ref.slot, ref.generation, State.RESERVED):
            raise AssertionError(f"commit of a slot that is not reserved: {ref}")
        if index > 0 and parent not in self.chunks:
            raise AssertionError(f"commit of chunk {index} without its parent")
        self._granted.discard(ref.slot)
        if key in self.chunks:
            self._free.append(ref.slot)
            return
        self.headers.write(ref.slot, ref.generation, State.COMMITTED, key, index)
        self.chunks[key] = ref
        self.parents[key] = parent

    def _quarantine(self) -> None:
        for slot in self._granted:
            assert self.headers is not None
            self.headers.write(slot, self._generation, State.QUARANTINE)
        self._quarantined += self._granted
        self._granted.clear()
