"""Checks of one engine: is it up, and which models does it serve. Called by mind/fleet.py, supervised.

A passive mark (a refused connection, reported by the relay) takes a replica out at once; only a
check brings it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import aiohttp
import msgspec

from kvist_router.bounded import body_of
from kvist_router.mind.breaker import Breaker
from kvist_router.mind.models import ServedModel, read_models
from kvist_router.mind.prefix_cache import read_prefix_cache
from kvist_router.mind.replica import Replica
from kvist_router.settings import HealthSettings

MODELS_EVERY = 15  # checks between two readings of the model list
MAX_ANSWER_BYTES = 16 * 2**20  # of a list of models, or a page of metrics
DOWN_SECONDS = 0.25  # pause between checks of an engine that is down

_log = logging.getLogger(__name__)


class HealthChecker:
    """GET /health, and /v1/models when the engine came up and now and then."""

    def __init__(self, session: aiohttp.ClientSession, settings: HealthSettings) -> None:
        self._session = session
        self._settings = settings

    def breaker(self) -> Breaker:
        """One for a replica, as the settings have it."""
        return Breaker(self._settings.breaker_failures, self._settings.breaker_seconds)

    async def run(self, replica: Replica) -> None:
        """Check until cancelled."""
        failures = checks = 0
        while True:
            read_list = not replica.healthy or checks % MODELS_EVERY == 0
            problem = await self._check(replica, read_list)
            checks += 1
            failures = failures + 1 if problem else 0
            self._mark(replica, problem, failures)
            if read_list and not problem and replica.agent is None:
                await self._prefix_cache(replica)
            pause = self._settings.interval_seconds
            await asyncio.sleep(pause if replica.healthy else min(pause, DOWN_SECONDS))

    def _mark(self, replica: Replica, problem: str, failures: int) -> None:
        if not problem:
            if not replica.healthy:
                _log.info("engine %s is up, models: %s", replica.name, ", ".join(replica.models))
            replica.healthy, replica.problem = True, ""
        elif failures >= self._settings.failures or not replica.healthy:
            if replica.healthy:
                _log.warning("engine %s is down: %s", replica.name, problem)
            replica.healthy, replica.problem = False, problem

    async def _check(self, replica: Replica, read_list: bool) -> str:
        """What is wrong; empty when nothing is."""
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                async with self._session.get(f"{replica.url}/health") as answer:
                    if answer.status != 200:
                        return f"/health answers {answer.status}"
                    await body_of(answer, MAX_ANSWER_BYTES)
                if read_list:
                    await self._models(replica)
                return ""
        except TimeoutError:
            return "no answer in time"
        except msgspec.MsgspecError as error:
            return f"/v1/models is not a model list: {error}"
        except (aiohttp.ClientError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    async def _prefix_cache(self, replica: Replica) -> None:
        """Its own figures, where it has a page of metrics (potential.py)."""
        # A page that is slow, or another than expected, says nothing of the engine's health.
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
            async with (
                asyncio.timeout(self._settings.timeout_seconds),
                self._session.get(f"{replica.url}/metrics") as answer,
            ):
                if answer.status == 200:
                    replica.prefix_cache = read_prefix_cache(
                        (await body_of(answer, MAX_ANSWER_BYTES)).decode()
                    )

    async def _models(self, replica: Replica) -> None:
        async with self._session.get(f"{replica.url}/v1/models") as answer:
            if answer.status != 200:
                raise msgspec.ValidationError(f"status {answer.status}")
            models: dict[str, ServedModel] = read_models(await body_of(answer, MAX_ANSWER_BYTES))
        if not replica.healthy:
            replica.started()
        replica.models = models
