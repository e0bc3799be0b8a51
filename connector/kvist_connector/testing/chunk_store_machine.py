"""State machine of the `ChunkStore` contract: any order of puts, reads, deletions, lists and restarts.

A backend's tests subclass it with `open`, and with `interrupt` where a writer can die halfway,
and give it to `hypothesis.stateful.run_state_machine_as_test` (in a thread when a loop runs).
The model is a dictionary; the store must agree with it after every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvist_connector.testing.chunk_store import key, read_all
from kvist_connector.tiers.base import ChunkStore

R = TypeVar("R")
_KEYS = st.integers(0, 4).map(key)
_CONTENTS = st.binary(min_size=1, max_size=300) | st.integers(1, 9).map(lambda number: b"x" * 1000 * number)


class ChunkStoreMachine(RuleBasedStateMachine):
    """See module. `points` are the places where `interrupt` can end a writer."""

    points: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._model: dict[bytes, bytes] = {}

    async def open(self) -> ChunkStore:
        """The store: empty at the machine's first call, with what it held at later ones."""
        raise NotImplementedError

    async def interrupt(self, store: ChunkStore, name: bytes, data: bytes, point: str) -> None:
        """A writer of the object dies at the point; nothing is cleaned up but by the kernel."""
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        """Nothing is stored."""
        self.store = self._run(self.open())

    @rule(name=_KEYS, data=_CONTENTS)
    def put(self, name: bytes, data: bytes) -> None:
        """The first one wins."""
        half = len(data) // 2
        stored = self._run(self.store.put_if_absent(name, [data[:half], data[half:]]))
        assert stored == (name not in self._model)
        self._model.setdefault(name, data)

    @rule(name=_KEYS, data=_CONTENTS, known=st.booleans())
    def replace(self, name: bytes, data: bytes, known: bool) -> None:
        """Only what begins as the caller says."""
        was = self._model.get(name, b"x")
        seen = was[:9] if known else bytes([was[0] ^ 1])
        replaced = self._run(self.store.replace(name, seen, [data]))
        assert replaced == (known and name in self._model)
        if replaced:
            self._model[name] = data

    @rule(name=_KEYS, room=st.integers(1, 10_000))
    def get(self, name: bytes, room: int) -> None:
        """Whole or not at all."""
        length, data = self._run(read_all(self.store, name, room))
        wanted = self._model.get(name)
        assert length == (None if wanted is None else len(wanted))
        if wanted is not None:
            assert data[: len(wanted)] == wanted[:room]

    @rule(name=_KEYS)
    def delete(self, name: bytes) -> None:
        """Told whether there was one."""
        assert self._run(self.store.delete(name)) == (self._model.pop(name, None) is not None)

    @rule()
    def ask(self) -> None:
        """Sizes in the order of the keys."""
        names = [key(number) for number in range(6)]
        wanted = [len(self._model[name]) if name in self._model else None for name in names]
        assert self._run(self.store.sizes(names)) == wanted

    @rule()
    def list(self) -> None:
        """Complete where the store says so."""
        if self.store.capabilities.listable:
            wanted = {name: len(data) for name, data in self._model.items()}
            assert self._run(self._listed()) == wanted

    @rule()
    def restart(self) -> None:
        """Objects of a persistent store outlive whoever wrote them."""
        self._run(self.store.close())
        self.store = self._run(self.open())

    @precondition(lambda self: bool(self.points))
    @rule(data=st.data(), name=_KEYS, content=_CONTENTS)
    def crash(self, data: st.DataObject, name: bytes, content: bytes) -> None:
        """The object is there whole or not at all, and can be put again."""
        point = data.draw(st.sampled_from(self.points))
        self._run(self.interrupt(self.store, name, content, point))
        self.store = self._run(self.open())
        length, found = self._run(read_all(self.store, name, len(content)))
        if name not in self._model and length is not None:
            assert (length, found) == (len(content), content)
            self._model[name] = content

    def teardown(self) -> None:
        """Let go of the store and the loop."""
        if hasattr(self, "store"):
            self._run(self.store.close())
        self._runner.close()

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        return self._runner.run(work)

    async def _listed(self) -> dict[bytes, int]:
        return {item.key: item.size async for item in self.store.items()}
