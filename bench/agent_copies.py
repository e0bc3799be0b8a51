"""Stores and loads of whole prompts through an agent process, timed with every message they take."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

from bench.arena_rig import BLOCK_TOKENS, LAYERS, Pages, attached, load, store
from kvist_connector.keys import CHUNK_TOKENS
from kvist_connector.protocol import engine as wire
from kvist_connector.testing.fake_engine import FakeEngine, layout
from kvist_connector.transfer.arena_view import ArenaView
from kvist_connector.transfer.base import Transfer
from kvist_connector.transfer.plan import Piece

_ROOT = bytes(16)
_REQUEST = "r"


class AgentCopies:
    """`start`, then `prompt`, `store` and `load` of its keys, `stop` at the end. Seconds throughout."""

    def __init__(self, engine: FakeEngine, transfer: Transfer, pages: Pages) -> None:
        self._engine = engine
        self._transfer = transfer
        self._numbers = list(range(pages.count))
        random.Random(1).shuffle(self._numbers)
        self._refs: list[wire.SlotRef] = []

    @classmethod
    async def start(cls, socket: Path, pages: Pages) -> AgentCopies:
        """Connect both halves and map the arena."""
        table = pages.table(CHUNK_TOKENS)
        engine = await FakeEngine.start(
            socket,
            layout(
                layers=LAYERS,
                layer_bytes=table.layer_bytes,
                blocks=table.blocks,
                chunk_tokens=CHUNK_TOKENS,
                block_tokens=BLOCK_TOKENS,
            ),
        )
        arena = engine.workers[0].arena
        assert arena is not None
        view = ArenaView(Path(arena.path), arena.geometry, 0)
        view.populate()
        return cls(engine, attached(table, view), pages)

    async def prompt(self, number: int, tokens: int) -> list[bytes]:
        """Keys of a prompt of its own; slots for it are granted."""
        count = tokens // CHUNK_TOKENS
        self._engine.granted += [
            ref for grant in self._engine.scheduler.received(wire.Grant) for ref in grant.refs
        ]
        self._refs = await self._engine.grant(count)
        draw = random.Random(number)
        return [draw.randbytes(16) for _ in range(count)]

    async def store(self, keys: Sequence[bytes]) -> float:
        """From pages until a lookup finds all of it."""
        began = time.perf_counter()
        store(self._transfer, self._pieces(self._refs, keys))
        commits = tuple(
            wire.Commit(ref=ref, key=key, parent=keys[index - 1] if index else _ROOT, index=index)
            for index, (ref, key) in enumerate(zip(self._refs, keys, strict=True))
        )
        self._engine.scheduler.send(wire.Step(commits=commits))
        await self._found(keys)
        taken = time.perf_counter() - began
        self._engine.scheduler.send(wire.Step(releases=(_REQUEST,)))
        return taken

    async def load(self, keys: Sequence[bytes]) -> float:
        """From the lookup until the last byte is in its page."""
        began = time.perf_counter()
        answer = await self._found(keys)
        load(self._transfer, self._pieces(answer.refs, keys))
        taken = time.perf_counter() - began
        self._engine.scheduler.send(wire.Step(releases=(_REQUEST,)))
        return taken

    async def stop(self) -> None:
        """Unmap and disconnect."""
        self._transfer.close()
        self._transfer.attach(None)
        await self._engine.stop()

    async def _found(self, keys: Sequence[bytes]) -> wire.Answer:
        answer = await self._engine.lookup(keys, _REQUEST, release=False)
        if len(answer.refs) != len(keys):
            raise RuntimeError(f"{len(answer.refs)} of {len(keys)} chunks are there")
        return answer

    def _pieces(self, refs: Sequence[wire.SlotRef], keys: Sequence[bytes]) -> list[Piece]:
        blocks = CHUNK_TOKENS // BLOCK_TOKENS
        return [
            Piece(
                ref.slot,
                ref.generation,
                0,
                tuple(self._numbers[number * blocks : (number + 1) * blocks]),
                key,
                number,
            )
            for number, (ref, key) in enumerate(zip(refs, keys, strict=True))
        ]
