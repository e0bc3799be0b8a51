"""Which replica holds a stored response of /v1/responses. Called by mind/mind.py.

An engine keeps its responses to itself and names them itself, so any router finds one by asking all replicas
at once; where it was is remembered. Costs a round trip the first time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import aiohttp

from kvist_router.errors import Refused
from kvist_router.mind.interface import Refusal
from kvist_router.mind.replica import Replica
from kvist_router.tokens.lru import SizedLRU
from kvist_router.tokens.request import Request

REMEMBERED = 65_536
_ID = re.compile(r"resp_[A-Za-z0-9_-]{1,123}")  # nothing that could be another path
_AT_ONCE = 64  # replicas asked at one time


class ResponseFinder:
    """Asks engines; `deadline` seconds for all of them."""

    def __init__(self, session: aiohttp.ClientSession, deadline: float) -> None:
        self._session = session
        self._deadline = deadline
        self._known: SizedLRU[str, str] = SizedLRU(REMEMBERED)

    async def narrow(self, request: Request, replicas: list[Replica]) -> list[Replica]:
        """The replica that holds the response a request goes on from or asks for; else all of them.

        Raises Refused when a stored response is asked for that nobody has.
        """
        if not _ID.fullmatch(request.response) or len(replicas) == 1:
            return replicas
        name = self._known.get(request.response)
        found = [replica for replica in replicas if replica.name == name]
        found = found or await self._ask(request.response, replicas)
        if found:
            self._known.put(request.response, found[0].name, 1)
            return found
        if request.path == "stored":
            raise Refused(_unknown(request.response))
        return replicas  # the engine says in its own words that it knows no such response

    async def _ask(self, response: str, replicas: Sequence[Replica]) -> list[Replica]:
        places = asyncio.Semaphore(_AT_ONCE)
        asked = {asyncio.create_task(self._has(response, replica, places)): replica for replica in replicas}
        try:
            async with asyncio.timeout(self._deadline):
                for answer in asyncio.as_completed(asked):
                    await answer
                    found = [replica for task, replica in asked.items() if task.done() and task.result()]
                    if found:
                        return found
        except TimeoutError:
            pass  # one that does not answer is as good as one that has nothing
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return []

    async def _has(self, response: str, replica: Replica, places: asyncio.Semaphore) -> bool:
        try:
            async with places, self._session.get(f"{replica.url}/v1/responses/{response}") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError):
            return False


def _unknown(response: str) -> Refusal:
    return Refusal(
        404,
        f"no replica has the response {response!r}; engines keep them, until they end, only with "
        "VLLM_ENABLE_RESPONSES_API_STORE=1 in their environment",
        param="response_id",
        code="response_not_found",
    )
