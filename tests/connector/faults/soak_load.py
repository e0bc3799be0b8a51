"""Load of the soak: engines that store and look up prompts on a real agent and know every byte by heart.

A chunk's bytes are a function of its key, so a wrong one is seen whichever tier or agent it came from.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvist_connector.protocol import engine as wire
from kvist_connector.testing.fake_engine import FakeEngine, content, prompt_keys

PROMPTS = 60
LONGEST = 16  # chunks
REQUEST_SECONDS = 20.0  # FakeEngine's own deadline: a request that takes longer has failed


@dataclass
class Progress:
    """What all engines have done; `after` is the soak's clock."""

    requests: int = 0
    hits: Counter[int] = field(default_factory=Counter)  # chunks by tier
    broken: int = 0  # requests whose agent or engine was killed under them
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def done(self, answer: wire.Answer) -> None:
        """One request has ended well."""
        self.requests += 1
        self.hits.update(answer.tiers)
        self.news.set()

    async def after(self, more: int, while_: str) -> None:
        """Return when so many more requests have ended; AssertionError when they do not come."""
        wanted, began = self.requests + more, self.requests
        try:
            async with asyncio.timeout(REQUEST_SECONDS * 5):
                while self.requests < wanted:
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            ended = self.requests - began
            raise AssertionError(f"only {ended} requests and {self.broken} broken: {while_}") from None


class Engine:
    """One engine on the agent of a folder; `run` until cancelled."""

    def __init__(self, socket: Path, up: asyncio.Event, seed: int, progress: Progress) -> None:
        self._socket = socket
        self._up = up  # the agent
        self._draw = random.Random(seed)
        self._progress = progress
        self._engine: FakeEngine | None = None

    async def run(self) -> None:
        """Prompts without end; whoever is killed under one begins the next."""
        while True:
            await self._up.wait()
            try:
                if self._engine is None:
                    self._engine = await FakeEngine.start(self._socket)
                await self._request(self._engine)
            except TimeoutError:
                raise  # an OSError to Python; here a request that failed
            except (OSError, StaleError):
                self._progress.broken += 1
                await self.die()
                await asyncio.sleep(0)  # whoever else has something to do comes first

    async def die(self) -> None:
        """As a killed process: its connections and mapping are gone."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()

    async def _request(self, engine: FakeEngine) -> None:
        # A few prompts are most of the load, as in life.
        number = int(PROMPTS ** self._draw.random())
        keys = prompt_keys(range(10_000 * number, 10_000 * number + 8 * self._draw.randint(2, LONGEST)))
        answer = await engine.lookup(keys, release=False)
        self._alive(engine)
        self._verify(engine, keys, answer)
        await self._store(engine, keys, len(answer.refs))
        engine.scheduler.send(wire.Step(releases=("r",)))
        self._progress.done(answer)

    def _alive(self, engine: FakeEngine) -> None:
        if engine is not self._engine or engine.scheduler.closed.is_set():
            raise StaleError

    def _verify(self, engine: FakeEngine, keys: list[bytes], answer: wire.Answer) -> None:
        for key, ref in zip(keys, answer.refs, strict=False):
            for worker in engine.workers:
                found = worker.read(ref)
                if found is None:
                    # Leased chunks do not change while the agent lives.
                    assert engine.scheduler.closed.is_set(), "a leased chunk was taken away"
                    raise StaleError
                assert found == content(key, worker.rank, worker.slot_size), "wrong bytes"

    async def _store(self, engine: FakeEngine, keys: list[bytes], start: int) -> None:
        """What can be stored in the slots that are granted now; an engine waits for no slot."""
        for index in range(start, len(keys)):
            engine.granted += [ref for grant in engine.scheduler.received(wire.Grant) for ref in grant.refs]
            if not engine.granted:
                return
            (ref,) = await engine.grant(1)
            self._alive(engine)
            for worker in engine.workers:
                if not worker.fill(ref, content(keys[index], worker.rank, worker.slot_size)):
                    raise StaleError
            parent = keys[index - 1] if index else bytes(16)
            commit = wire.Commit(ref=ref, key=keys[index], parent=parent, index=index)
            engine.scheduler.send(wire.Step(commits=(commit,)))


class StaleError(Exception):
    """The agent was killed under a request, and another one owns the slots."""
