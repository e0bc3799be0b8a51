"""Which background tasks do their work: what `/healthz` and `/readyz` say about watches, sweep and election.

A task that fails is started again (supervise.py), which nobody would notice; here it is noted since when
none of its attempts has come to anything. Built by app.py, asked by runtime.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from kvist_operator.control.errors import ApiError, Unavailable

# A task that has failed for so long is of no use now; after the longer time a new process is the last remedy.
UNREADY_SECONDS: Final = 60.0
UNHEALTHY_SECONDS: Final = 600.0


@dataclass(frozen=True)
class _State:
    since: float | None = None  # of the first failure after which nothing went well
    error: str = ""
    excused: bool = False  # the server or the way to it: another process would meet the same
    ended: bool = False


class Vitals:
    """States by the task's name, of which there are a handful."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[str, _State] = {}

    def well(self, name: str) -> None:
        """The task does what it is for."""
        self._states[name] = _State()

    def failed(self, name: str, error: Exception) -> None:
        """An attempt came to nothing."""
        old = self._states.get(name, _State())
        since = self._clock() if old.since is None else old.since
        text = str(error) if isinstance(error, ApiError) else repr(error)
        self._states[name] = _State(since, text, isinstance(error, Unavailable | TimeoutError))

    def ended(self, name: str) -> None:
        """The task will not be started again."""
        self._states[name] = replace(self._states.get(name, _State()), ended=True)

    def forget(self, name: str) -> None:
        """The task is not wanted any more."""
        self._states.pop(name, None)

    def problem(self) -> str:
        """Why a new process is needed; empty when none is."""
        dead = [f"{name} ended" for name, state in self._states.items() if state.ended]
        return "; ".join([*dead, *self._failing(UNHEALTHY_SECONDS, excuse=True)])

    def unready(self) -> str:
        """What does not work now; empty when everything does."""
        return self.problem() or "; ".join(self._failing(UNREADY_SECONDS, excuse=False))

    def _failing(self, seconds: float, *, excuse: bool) -> list[str]:
        now = self._clock()
        return [
            f"{name} has failed for {now - state.since:.0f} s: {state.error}"
            for name, state in self._states.items()
            if state.since is not None and now - state.since >= seconds and not (excuse and state.excused)
        ]
