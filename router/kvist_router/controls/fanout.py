"""One question to the agents of many replicas at once. Called by routes.py and spread.py.

Whoever does not answer, or has no agent, is said by name: nothing is retried here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import aiohttp

from kvist_router.bounded import body_of
from kvist_router.mind.agent_link import ASK_ERRORS, AgentLink, why_not
from kvist_router.mind.replica import Replica

Answer = dict[str, Any]
NO_AGENT = "no agent: an engine without connector cannot be controlled"
MAX_ANSWER_BYTES = 256 * 2**20  # a lookup of all chunks of a large agent has about 100 MB
MAX_ANSWERS_BYTES = 2**30  # of all agents to one question
_AT_ONCE = 64


class FanOut:
    """`seconds` is the deadline of one agent's answer, `most` the bytes of all answers to a question."""

    def __init__(
        self, session: aiohttp.ClientSession, link: AgentLink, seconds: float, most: int = MAX_ANSWERS_BYTES
    ) -> None:
        self._session = session
        self._link = link
        self._timeout = aiohttp.ClientTimeout(total=seconds)
        self._most = most
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def ask(self, replicas: Iterable[Replica], path: str, body: Answer) -> dict[str, Answer]:
        """Answers by replica; {"error": text} where there was none."""
        asked = list(replicas)
        most = min(MAX_ANSWER_BYTES, self._most // max(1, len(asked)))
        answers = await asyncio.gather(*(self._ask(replica, path, body, most) for replica in asked))
        return {replica.name: answer for replica, answer in zip(asked, answers, strict=True)}

    async def ask_one(self, replica: Replica, path: str, body: Answer) -> Answer:
        """One agent's answer, or {"error": text}."""
        return await self._ask(replica, path, body, min(MAX_ANSWER_BYTES, self._most))

    async def _ask(self, replica: Replica, path: str, body: Answer, most: int) -> Answer:
        if replica.agent is None:
            return {"error": NO_AGENT}
        try:
            url = replica.agent + path
            async with (
                self._slots,
                self._link.asked(self._session, "POST", url, self._timeout, json=body) as answer,
            ):
                return _said(answer.status, json.loads(await body_of(answer, most)))
        except aiohttp.ClientPayloadError as error:
            return {"error": f"{error}: ask fewer replicas at a time, or for less"}
        except (*ASK_ERRORS, ValueError, RecursionError) as error:
            return {"error": why_not(error)}


def _said(status: int, document: Any) -> Answer:
    if not isinstance(document, dict):
        return {"error": f"status {status} without a JSON object"}
    if status == 200:
        return document
    inner = document.get("error")
    return {"error": str(inner.get("message") if isinstance(inner, dict) else inner), "status": status}
