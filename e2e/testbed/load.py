"""Light load on a router while something happens to its cluster, and what became of every request."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from testbed.bed import BedError
from testbed.client import Client
from testbed.waiting import until

TOKENS = 8
SUBJECTS = ("oak", "birch", "willow", "maple")


def prompts(subjects: Sequence[str] = SUBJECTS, sentences: int = 45) -> tuple[str, ...]:
    """One a subject, of two chunks and some; no two share a chunk."""
    return tuple(
        " ".join(
            f"The {number}th branch of the {subject} carries {number * 7} leaves."
            for number in range(1, sentences)
        )
        for subject in subjects
    )


@dataclass(frozen=True)
class Outcome:
    """One request. `failure` is empty when it was answered; times are monotonic."""

    prompt: str
    ended: float
    failure: str = ""
    text: str = ""
    replica: str = ""
    tokens: int = 0
    reused: int = 0


class Load(AbstractContextManager["Load"]):
    """Clients that ask one request after another; each takes the next prompt in turn.

    `patience`: seconds a client waits for a word, and the end of the load for its clients.
    """

    def __init__(
        self,
        client: Client,
        asked: Sequence[str],
        clients: int = 2,
        tokens: int = TOKENS,
        pause: float = 0.5,
        patience: float = 300.0,
    ) -> None:
        self._client = client
        self._prompts = itertools.cycle(asked)
        self._window = 2 * len(asked)
        self._tokens = tokens
        self._pause = pause
        self._patience = patience
        self._outcomes: list[Outcome] = []
        self._running = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(self._patience)

    def outcomes(self) -> tuple[Outcome, ...]:
        """All so far, in the order of their ends."""
        with self._lock:
            return tuple(self._outcomes)

    def running(self) -> int:
        """Requests that wait for their answer."""
        with self._lock:
            return self._running

    def failures(self) -> list[str]:
        """Why requests were not answered."""
        return [outcome.failure for outcome in self.outcomes() if outcome.failure]

    def texts(self) -> dict[str, set[str]]:
        """The answers to every prompt: one each, as long as no token was wrong."""
        found: dict[str, set[str]] = {}
        for outcome in self.outcomes():
            if not outcome.failure:
                found.setdefault(outcome.prompt, set()).add(outcome.text)
        return found

    def more(self, count: int, seconds: float = 300) -> None:
        """Wait until so many more are answered."""
        wanted = len(self._answered()) + count
        until(f"{count} answers", lambda: len(self._answered()) >= wanted, seconds, self.last_words)

    def rate(self) -> float:
        """Reused share of the prompt tokens of the latest answers, two for each prompt."""
        return share(self._answered()[-self._window :])

    def recovered(self, since: float, rate: float, seconds: float = 300) -> float:
        """Seconds from `since` until as many answers as `rate` looks at, all later, reuse that share."""

        def found() -> float | None:
            later = [outcome for outcome in self._answered() if outcome.ended > since]
            windows = (later[n : n + self._window] for n in range(len(later) - self._window + 1))
            return next((window[-1].ended - since for window in windows if share(window) >= rate), None)

        until("the reuse of before", lambda: found() is not None, seconds, self.last_words)
        return found() or 0.0

    def last_words(self) -> str:
        """The latest outcomes, for messages."""
        return "\n".join(str(outcome) for outcome in self.outcomes()[-6:])

    def _answered(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes() if not outcome.failure]

    def _ask(self) -> None:
        while not self._stop.wait(self._pause):
            with self._lock:
                prompt = next(self._prompts)
                self._running += 1
            outcome = self._one(prompt)
            with self._lock:
                self._running -= 1
                self._outcomes.append(outcome)

    def _one(self, prompt: str) -> Outcome:
        try:
            answer = self._client.complete(prompt, self._tokens, seconds=self._patience)
        except (BedError, OSError, http.client.HTTPException) as error:
            return Outcome(prompt, time.monotonic(), failure=f"{type(error).__name__}: {error}")
        return Outcome(
            prompt, time.monotonic(), "", answer.text, answer.replica, answer.tokens, answer.reused
        )


def share(outcomes: Sequence[Outcome]) -> float:
    """Reused share of their prompt tokens."""
    return sum(outcome.reused for outcome in outcomes) / max(1, sum(outcome.tokens for outcome in outcomes))
