"""Sets, honours and takes away the finalizer of farewell.py. Called by reconcile.py."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvist_connector.quantity import counted
from kvist_operator.control import reasons
from kvist_operator.control.api import Api
from kvist_operator.control.ask import Programs
from kvist_operator.control.errors import NoAnswer, NotFound
from kvist_operator.control.farewell import Farewell, clears, farewell, mark_patch, marked
from kvist_operator.control.gather import Gatherer
from kvist_operator.control.journal import Journal
from kvist_operator.control.pods import Pod
from kvist_operator.control.resources import CLUSTERS, Object
from kvist_operator.spec.base import SecretRef

AGAIN_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Waiting:
    """An object under deletion is kept for `again` seconds; `why` the last attempt did not work."""

    again: float
    why: str


class Parting:
    """One step at a time; what is not done in a turn is tried in the next."""

    def __init__(self, api: Api, programs: Programs, gatherer: Gatherer, journal: Journal) -> None:
        self._api = api
        self._programs = programs
        self._gatherer = gatherer
        self._journal = journal

    async def keep_mark(self, raw: Object) -> Object:
        """The object with the finalizer if its spec wants one, without if not."""
        return await self._patch(raw, on=clears(raw)) or raw

    async def end(self, raw: Object, token: SecretRef, known_token: str, failed: str) -> Waiting | None:
        """A turn of an object under deletion: None when nothing is left to do.

        `known_token` is for a namespace that goes as a whole, its Secrets perhaps first.
        """
        if not marked(raw):
            return None
        namespace = raw["metadata"]["namespace"]
        pods = await self._gatherer.pods(namespace, raw["metadata"]["name"])
        decision = farewell(raw, pods, self._gatherer.now(), failed)
        if decision.ask:
            text = await self._gatherer.token(namespace, token) or known_token
            removed = await self._clear(decision, text)
            if isinstance(removed, str):
                decision = farewell(raw, pods, self._gatherer.now(), removed)
                if decision.ask:
                    return Waiting(min(AGAIN_SECONDS, decision.seconds), removed)
            else:
                await self._journal.tell(raw, reasons.CLEARED, _told(removed))
        if decision.stays:
            what = f"chunks stay in the shared tiers: {decision.stays}"
            message = reasons.told(reasons.CHUNKS_STAY, what)
            await self._journal.tell(raw, reasons.CHUNKS_STAY, message, warning=True)
        await self._patch(raw, on=False)
        return None

    async def _clear(self, decision: Farewell, token: str) -> Mapping[str, int] | str:
        """Chunks removed by tier, or why that did not work.

        An agent that drains as it ends would copy its own chunks into the shared tiers again, so all of them
        lose theirs first.
        """
        problem = ""
        try:
            async with asyncio.timeout(decision.seconds):
                each = (self._ask(pod, token, decision.seconds, shared=False) for pod in decision.ask)
                await asyncio.gather(*each)
                for pod in decision.ask:
                    answer = await self._ask(pod, token, decision.seconds, shared=True)
                    if not isinstance(answer, str):
                        return answer
                    problem = answer
        except TimeoutError:
            return problem or "no agent had done it in time"
        return problem

    async def _ask(self, pod: Pod, token: str, seconds: float, *, shared: bool) -> Mapping[str, int] | str:
        try:
            return await self._programs.clear(pod, token, seconds, shared=shared)
        except NoAnswer as error:
            return str(error)

    async def _patch(self, raw: Object, *, on: bool) -> Object | None:
        patch = mark_patch(raw, on=on)
        meta = raw["metadata"]
        if patch is None:
            return None
        try:
            return await self._api.patch(CLUSTERS, meta["namespace"], meta["name"], patch)
        except NotFound:
            return None  # deleted meanwhile


def _told(removed: Mapping[str, int]) -> str:
    counts = ", ".join(f"{counted(count, 'chunk')} of {tier}" for tier, count in sorted(removed.items()))
    return f"shared tiers were cleared: {counts or 'there are none'}"
