"""New text to tokens: short text on the loop, longer text in threads. Called by tokenizer.py.

The encoder releases the GIL, so that relays and feeds go on meanwhile. Threads are few, and texts are
encoded in the order in which they came. Text that is being encoded already is waited for, so a burst of one
new prompt costs it once. What was begun is finished and kept, even if its client has left.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvist_router.errors import NotExact
from kvist_router.tokens.text_encoder import TextEncoder

MOST_THREADS = 4
MOST_JOBS = 64  # in the threads' queue; more wait before it, each within the deadline of its decision

Tokens = dict[str, bytes]


class Encoder:
    """`keep` gets what was encoded."""

    def __init__(self, text: TextEncoder, inline_characters: int, keep: Callable[[Tokens], None]) -> None:
        self._text = text
        self._inline = inline_characters
        self._keep = keep
        threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) - 1))
        self._threads = ThreadPoolExecutor(threads, "encode")  # each starts when it is needed
        self._places = asyncio.Semaphore(MOST_JOBS)
        self._coming: dict[str, asyncio.Task[Tokens]] = {}
        self.characters = 0  # encoded so far

    async def encode(self, pieces: set[str]) -> Tokens:
        """Packed tokens of each piece; raises NotExact."""
        new = [piece for piece in pieces if piece not in self._coming]
        jobs = {self._coming[piece] for piece in pieces if piece in self._coming}
        found: Tokens = {}
        if new:
            characters = sum(map(len, new))
            self.characters += characters
            if characters <= self._inline:
                found = self._now(new)
                self._keep(found)
            else:
                jobs.add(self._begin(new))
        for job in jobs:
            found = found | await asyncio.shield(job)
        return found

    def _begin(self, pieces: list[str]) -> asyncio.Task[Tokens]:
        job = asyncio.create_task(self._later(pieces))
        self._coming.update(dict.fromkeys(pieces, job))

        def over(job: asyncio.Task[Tokens]) -> None:
            for piece in pieces:
                del self._coming[piece]
            if not job.cancelled() and job.exception() is None:
                self._keep(job.result())

        job.add_done_callback(over)
        return job

    async def _later(self, pieces: list[str]) -> Tokens:
        async with self._places:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._now, pieces)

    def _now(self, pieces: list[str]) -> Tokens:
        try:
            return dict(zip(pieces, self._text.packed(pieces), strict=True))
        except (UnicodeEncodeError, TypeError) as error:  # lone surrogates have no UTF-8 form
            raise NotExact("text is not Unicode") from error
