"""Whether this router should get traffic: `/readyz`. Called by mind_side.py.

A router that just started knows nothing of what replicas hold, and would scatter conversations.
So it first waits until every replica's feed has brought its whole index and local tokens are verified,
at most `wait_seconds`; after that once, a lost feed or a new replica does not take it out of service.
Nor do replicas that are all down, where requests wait for one (`limits.queue_seconds`): they could not reach
the queue of a router that is not ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvist_router.discovery.source import Source
from kvist_router.mind.interface import Known, View
from kvist_router.mind.prompts import PromptSource
from kvist_router.mind.replica import Replica


class Readiness:
    """`replicas` is the mind's own map."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        source: PromptSource,
        discovery: Source,
        wait_seconds: float,
        queues: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._source = source
        self._discovery = discovery
        self._stopping = False
        self._clock = clock
        self._until = clock() + wait_seconds
        self._queues = queues
        self._was_ready = False

    def stop(self) -> None:
        """The router is about to end: from now on it is not ready."""
        self._stopping = True

    def problem(self) -> str:
        """Why requests should not come here; empty when they may."""
        if self._stopping:
            return "the router is stopping"
        if self._queues and self._was_ready:
            return ""
        problem = self._problem()
        self._was_ready = self._was_ready or not problem
        return problem

    def _problem(self) -> str:
        replicas, now = list(self._replicas.values()), self._clock()
        if not replicas:
            return "; ".join(filter(None, ("no replica is known", self._discovery.problem)))
        if not any(replica.healthy and replica.models for replica in replicas):
            return "; ".join(f"{replica.name}: {replica.problem}" for replica in replicas)
        unknown = [replica for replica in replicas if replica.agent is not None and not replica.mirrored(now)]
        problems = [f"{item.name}: what it holds is not known yet{_why(item)}" for item in unknown]
        if self._source.unverified:
            problems.append("local tokens are still being compared with an engine's")
        if not problems or now >= self._until:
            self._until = now
            return ""
        return "; ".join(problems)


class LocalOutlook:
    """`interface.Outlook` beside the mind."""

    def __init__(self, replicas: Mapping[str, Replica], readiness: Readiness) -> None:
        self._replicas = replicas
        self._readiness = readiness

    def view(self) -> View:
        """See interface.Outlook."""
        replicas = list(self._replicas.values())
        serving = [item for item in replicas if item.serves and item.models]
        staying = [item for item in serving if not item.draining] or serving
        known = tuple(Known(item.name, item.url, tuple(item.models)) for item in staying)
        models = {name: model.longest for item in replicas for name, model in item.models.items()}
        return View(self._readiness.problem(), models, known, tuple(item.name for item in replicas))

    def degraded(self) -> str:
        """Nothing: where the mind is, it answers."""
        return ""

    def stop(self) -> None:
        """See interface.Outlook."""
        self._readiness.stop()


def _why(replica: Replica) -> str:
    if replica.feed_problem:
        return f" ({replica.feed_problem})"
    return "" if replica.fingerprinted else " (no engine has registered with its agent)"
