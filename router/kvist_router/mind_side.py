"""Composition of the mind: replicas, feeds, tokens, decisions, and the admin port that shows them.

Called by app.py when all is one process, by processes/child.py when the mind has its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import aiohttp
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from kvist_connector.tls import LiveContext
from kvist_router.access.guard import Guard
from kvist_router.access.salt import read_secret
from kvist_router.admin import admin_app
from kvist_router.controls.fanout import FanOut
from kvist_router.controls.moving import Mover
from kvist_router.controls.routes import ClusterControls
from kvist_router.controls.selection import Selections
from kvist_router.controls.spread import Spreader
from kvist_router.discovery.source import Source
from kvist_router.discovery.sources import source
from kvist_router.exposition import Exposition
from kvist_router.metrics import MindMetrics
from kvist_router.mind.agent_link import AgentLink
from kvist_router.mind.drain import DrainAcknowledger
from kvist_router.mind.feed_reader import FeedReader
from kvist_router.mind.fleet import Fleet
from kvist_router.mind.health import HealthChecker
from kvist_router.mind.mind import LocalMind
from kvist_router.mind.neighbours.compose import neighbours
from kvist_router.mind.policies import policy
from kvist_router.mind.prompts import PromptSource
from kvist_router.mind.responses import ResponseFinder
from kvist_router.mind.supervise import background, supervised
from kvist_router.mind.verify import Verifier
from kvist_router.readiness import LocalOutlook, Readiness
from kvist_router.settings import RouterSettings
from kvist_router.tokens.remote import RemoteTokenizer
from kvist_router.tokens.tokenizer import ModelTokenizer

# Of a control: a shared tier is listed and emptied meanwhile, or a long prefix read from it.
CONTROL_SECONDS = 100.0
# What is not moved by then stays, and the answer says so before whoever asked has given up.
MOVE_SECONDS = 80.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class MindSide:
    """A mind that runs."""

    mind: LocalMind
    outlook: LocalOutlook
    admin: ASGIApp


@asynccontextmanager
async def mind_side(
    settings: RouterSettings,
    registry: CollectorRegistry,
    exposition: Exposition,
    keep_series: Callable[[Collection[str]], None] = lambda names: None,
) -> AsyncIterator[MindSide]:
    """The mind with its background tasks running; raises ConfigError.

    `keep_series` drops metrics of replicas that are gone, beside the mind's own.
    """
    limits = settings.limits
    # aiohttp's own limit of 100 would be used up by the feeds of as many replicas.
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limits.connections), trust_env=False
    ) as session:
        found = source(settings, session, os.environ)
        metrics = MindMetrics(registry)
        async with (
            _mind(settings, found, session, metrics, keep_series) as mind,
            _controls(settings, mind, session) as controls,
        ):
            readiness = Readiness(
                mind.replicas, mind.source, found, settings.index.ready_seconds, limits.queue_seconds > 0
            )
            admin = admin_app(mind, exposition, controls, _guard(settings))
            yield MindSide(mind, LocalOutlook(mind.replicas, readiness), admin)


def _link(settings: RouterSettings) -> AgentLink:
    agent = settings.agent
    if not agent.tls.used:
        return AgentLink(settings.reader, agent.token_file)
    tls, serving = (LiveContext(kind, agent.tls, "agent.tls") for kind in ("client", "server"))
    return AgentLink(settings.reader, agent.token_file, tls, serving)


@asynccontextmanager
async def _controls(
    settings: RouterSettings, mind: LocalMind, session: aiohttp.ClientSession
) -> AsyncIterator[ClusterControls]:
    fanout = FanOut(session, _link(settings), CONTROL_SECONDS)
    spreader = Spreader(mind.replicas, fanout)
    selections = Selections(mind, read_secret(settings.tenant.secret_file))
    async with background("retirement", spreader.run, mind.metrics):
        yield ClusterControls(mind.replicas, fanout, selections, spreader, Mover(fanout, MOVE_SECONDS))


def _guard(settings: RouterSettings) -> Guard:
    return Guard(
        settings.admin_token_file,
        settings.agent.token_file,
        settings.admin_host in LOOPBACK,
        settings.admin_list_free,
    )


@asynccontextmanager
async def _mind(
    settings: RouterSettings,
    found: Source,
    session: aiohttp.ClientSession,
    metrics: MindMetrics,
    keep_series: Callable[[Collection[str]], None],
) -> AsyncIterator[LocalMind]:
    model = settings.model
    local = await asyncio.to_thread(_tokenizer, settings)
    remote = RemoteTokenizer(session, settings.tokens.remote_seconds)
    prompts = PromptSource(local, remote, metrics, verify=model.verify_cases > 0)
    secret = read_secret(settings.tenant.secret_file)
    finder = ResponseFinder(session, settings.tokens.remote_seconds)
    mind = LocalMind(
        settings, policy(settings.policy, settings.weights), prompts, metrics, secret, finder=finder
    )
    fleet = _fleet(settings, mind, session, metrics, keep_series)

    async def discover() -> None:
        async for replicas in found.watch():
            await fleet.apply(replicas)
        await asyncio.Event().wait()  # a static list never changes

    loops = [("discovery", discover)]
    if local is not None and model.verify_cases:
        verifier = Verifier(mind.replicas, prompts, remote, model.verify_cases)
        loops.append(("verify", verifier.run))
    tasks = [asyncio.create_task(supervised(name, loop, metrics)) for name, loop in loops]
    try:
        async with neighbours(settings.neighbours, mind, session, _link(settings)):
            yield mind
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await fleet.close()


def _tokenizer(settings: RouterSettings) -> ModelTokenizer | None:
    if settings.model.path is None:
        return None
    tokens = settings.tokens
    return ModelTokenizer(settings.model.path, tokens.cache_bytes, tokens.inline_characters)


def _fleet(
    settings: RouterSettings,
    mind: LocalMind,
    session: aiohttp.ClientSession,
    metrics: MindMetrics,
    keep_series: Callable[[Collection[str]], None],
) -> Fleet:
    link = _link(settings)
    silent = settings.index.silent_seconds
    reader = FeedReader(session, link, silent, mind.feed_message, time.monotonic, Random(), metrics)
    acknowledger = DrainAcknowledger(session, link, silent, Random())
    health = HealthChecker(session, settings.health)
    return Fleet(mind, settings.index, reader, acknowledger, health, metrics, keep_series)
