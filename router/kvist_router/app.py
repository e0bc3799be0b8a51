"""Composition root of the router: settings in, servers out. Called by __main__.py only."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random

import aiohttp
import uvloop
import yaml
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from kvist_connector import names
from kvist_connector.errors import ConfigError
from kvist_connector.settings import add_flags, load, program_parser, to_yaml
from kvist_router.access.door import Door
from kvist_router.access.guard import Guard
from kvist_router.access.keys import KeyBook
from kvist_router.admin import admin_app
from kvist_router.controls.fanout import FanOut
from kvist_router.controls.moving import Mover
from kvist_router.controls.routes import ClusterControls
from kvist_router.controls.selection import Selections
from kvist_router.controls.spread import Spreader
from kvist_router.discovery.source import Source
from kvist_router.discovery.sources import source
from kvist_router.endpoint import Endpoint, rest_app
from kvist_router.logs import RequestLog, configure, reconfigure
from kvist_router.metrics import MindMetrics, RelayMetrics
from kvist_router.mind.agent_link import AgentLink
from kvist_router.mind.drain import DrainAcknowledger
from kvist_router.mind.feed_reader import FeedReader
from kvist_router.mind.fleet import Fleet
from kvist_router.mind.health import HealthChecker
from kvist_router.mind.mind import LocalMind
from kvist_router.mind.policies import policy
from kvist_router.mind.prompts import PromptSource
from kvist_router.mind.responses import ResponseFinder
from kvist_router.mind.supervise import background, supervised
from kvist_router.mind.verify import Verifier
from kvist_router.readiness import Readiness
from kvist_router.relay.app import Relay
from kvist_router.relay.upstream import Upstream
from kvist_router.reload import ConfigFile, Reloader
from kvist_router.server import Served, Servers, listen
from kvist_router.settings import RouterSettings
from kvist_router.tls import ServerTls, TlsSettings
from kvist_router.tokens.remote import RemoteTokenizer
from kvist_router.tokens.tokenizer import ModelTokenizer

# Of a control: a shared tier is listed and emptied meanwhile, or a long prefix read from it.
CONTROL_SECONDS = 100.0
# What is not moved by then stays, and the answer says so before whoever asked has given up.
MOVE_SECONDS = 80.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_log = logging.getLogger(__name__)

_EXAMPLES = """examples:
  kvist router --replica http://127.0.0.1:8100,agent=http://127.0.0.1:8200,name=a \\
      --replica http://127.0.0.1:8101,agent=http://127.0.0.1:8201,name=b --model.path MODEL_FOLDER
  kvist router --replica http://engine-0:8000 --replica http://engine-1:8000     # unmodified vLLM
  kvist router --replicas-file replicas.yaml --port 8080
  kvist router --config router.yaml --print-config

A flag wins over its environment variable (in brackets), a variable over the file.
`kvist-router` and `python -m kvist_router` are the same program."""


def run(arguments: list[str]) -> int:
    """Parse, build, serve; returns the exit status."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        _take_replica_flags(parsed)
        settings = load(RouterSettings, parsed, os.environ, names.ENV_ROUTER)
        if parsed.print_config:
            sys.stdout.write(to_yaml(settings))
            return 0
        configure(settings.log_level, settings.log)
        read = partial(load, RouterSettings, parsed, os.environ, names.ENV_ROUTER)
        file = None if parsed.config is None else ConfigFile(parsed.config, read)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, file))
    except ConfigError as error:
        sys.stderr.write(f"kvist-router: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = program_parser(
        "kvist router",
        "OpenAI-compatible endpoint that sends each request where it will answer first.",
        _EXAMPLES,
        f"kvist {version('kvist')}",
    )
    parser.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="URL[,agent=URL][,name=NAME]",
        help="an engine; may be repeated",
    )
    add_flags(parser, RouterSettings, names.ENV_ROUTER)
    return parser


def _take_replica_flags(parsed: argparse.Namespace) -> None:
    """`--replica` is another spelling of the setting `replicas`."""
    if not parsed.replica:
        return
    replicas = []
    for text in parsed.replica:
        url, *rest = text.split(",")
        pairs = [item.partition("=") for item in rest]
        for name, equals, _ in pairs:
            if not equals or name not in ("agent", "name"):
                raise ConfigError(f"--replica {text}: {name!r} is not agent=URL or name=NAME")
        replicas.append({"url": url, **{name: value for name, _, value in pairs}})
    setattr(parsed, "field:replicas", yaml.safe_dump(replicas))


def _secret(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"tenant.secret_file: {path} cannot be read: {error.strerror}") from error
    if len(secret) < 16:
        raise ConfigError(f"tenant.secret_file: {path} holds {len(secret)} bytes; give at least 16")
    return secret


@dataclass(frozen=True, slots=True)
class Running:
    """A router that is built; `servers.run()` serves it. Tests and benches use it without a process."""

    mind: LocalMind
    servers: Servers
    url: str
    admin_url: str
    reloader: Reloader | None = None


@asynccontextmanager
async def build(settings: RouterSettings, file: ConfigFile | None = None) -> AsyncIterator[Running]:
    """Everything wired, background tasks running, ports bound; raises ConfigError.

    `file`: where the settings came from, to be read again when it changes.
    """
    registry, limits = CollectorRegistry(), settings.limits
    relay_metrics = RelayMetrics(registry)
    with (
        closing(listen(settings.host, settings.port, "port")) as endpoint_socket,
        closing(listen(settings.admin_host, settings.admin_port, "admin-port")) as admin_socket,
    ):
        async with (
            Upstream(limits) as upstream,
            # aiohttp's own limit of 100 would be used up by the feeds of as many replicas.
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=limits.connections), trust_env=False
            ) as others,
        ):
            found = source(settings, others, os.environ)
            async with (
                _mind(settings, found, others, MindMetrics(registry), relay_metrics) as mind,
                AsyncExitStack() as stack,
            ):
                controls = await stack.enter_async_context(_controls(settings, mind, others))
                book = await stack.enter_async_context(_book(settings, mind))
                tls = await stack.enter_async_context(_tls(settings.tls, mind))
                relay = Relay(mind, upstream, limits, relay_metrics, settings.admission.longest_wait)
                readiness = Readiness(
                    mind.replicas, mind.source, found, settings.index.ready_seconds, limits.queue_seconds > 0
                )
                rest, door = rest_app(mind, registry, readiness), Door(book, settings.tenant.header)
                admin = admin_app(mind, registry, controls, _guard(settings))
                app = Endpoint(relay, rest, door, relay_metrics)
                log = RequestLog(await stack.enter_async_context(_traced(app, settings)), settings.log)
                endpoint = Served(log, endpoint_socket, tls)
                own = Served(admin, admin_socket, tls if settings.tls.admin else None)
                servers = Servers([endpoint, own], limits, settings.grace_seconds, readiness.stop)
                live = Live(book, mind, relay, log)
                reloader = await stack.enter_async_context(_reloading(settings, file, live))
                yield Running(mind, servers, endpoint.url, own.url, reloader)


@asynccontextmanager
async def _book(settings: RouterSettings, mind: LocalMind) -> AsyncIterator[KeyBook]:
    """API keys, read again when their files change."""
    separated = settings.tenant.secret_file is not None
    book = await asyncio.to_thread(KeyBook, settings.auth, settings.tenants, separated)
    async with background("keys", book.watch, mind.metrics):
        yield book


@dataclass(frozen=True, slots=True)
class Live:
    """What takes other settings while it runs."""

    book: KeyBook
    mind: LocalMind
    relay: Relay
    log: RequestLog

    async def use(self, settings: RouterSettings) -> None:
        """Keys first: their files may be wrong, and then nothing has changed. Raises ConfigError."""
        await asyncio.to_thread(self.book.use, settings.auth, settings.tenants)
        self.mind.use(settings)
        self.relay.use(settings.limits, settings.admission.longest_wait)
        self.log.settings = settings.log
        reconfigure(settings.log_level, settings.log)


@asynccontextmanager
async def _reloading(
    settings: RouterSettings, file: ConfigFile | None, live: Live
) -> AsyncIterator[Reloader | None]:
    if file is None:
        yield None
        return
    reloader = Reloader(file, settings, live.use)
    async with background("reload", reloader.watch, live.mind.metrics):
        yield reloader


@asynccontextmanager
async def _traced(app: ASGIApp, settings: RouterSettings) -> AsyncIterator[ASGIApp]:
    """The app with a span around each request, where traces are wanted."""
    wanted = settings.tracing
    if wanted.endpoint is None:
        yield app
        return
    try:
        found = importlib.import_module("kvist_router.tracing")
    except ImportError as error:
        raise ConfigError(f"tracing.endpoint: {error.name} is missing: install kvist[tracing]") from error
    async with found.tracing(wanted.endpoint, wanted.ratio, _link(settings).reader) as tracer:
        yield found.Traced(app, tracer)


@asynccontextmanager
async def _tls(settings: TlsSettings, mind: LocalMind) -> AsyncIterator[ssl.SSLContext | None]:
    """Certificates, read again when their files change."""
    if settings.certificate_file is None:
        yield None
        return
    tls = await asyncio.to_thread(ServerTls, settings, settings.certificate_file)
    async with background("certificates", tls.watch, mind.metrics):
        yield tls.context


@asynccontextmanager
async def _controls(
    settings: RouterSettings, mind: LocalMind, session: aiohttp.ClientSession
) -> AsyncIterator[ClusterControls]:
    fanout = FanOut(session, _link(settings), CONTROL_SECONDS)
    spreader = Spreader(mind.replicas, fanout)
    selections = Selections(mind, _secret(settings.tenant.secret_file))
    async with background("retirement", spreader.run, mind.metrics):
        yield ClusterControls(mind.replicas, fanout, selections, spreader, Mover(fanout, MOVE_SECONDS))


def _guard(settings: RouterSettings) -> Guard:
    return Guard(settings.admin_token_file, settings.agent.token_file, settings.admin_host in LOOPBACK)


def _link(settings: RouterSettings) -> AgentLink:
    own = socket.gethostname() if settings.kubernetes.service else "router"
    return AgentLink(settings.name or own, settings.agent.token_file)


async def _serve(settings: RouterSettings, file: ConfigFile | None) -> None:
    async with build(settings, file) as running:
        _log.info("listening on %s, admin on %s", running.url, running.admin_url)
        settle_memory()
        if running.reloader is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, running.reloader.now)
        await running.servers.run_until_signal()


def settle_memory() -> None:
    """What lives as long as the process is not worth scanning on every collection: pauses hit p99."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@asynccontextmanager
async def _mind(
    settings: RouterSettings,
    found: Source,
    session: aiohttp.ClientSession,
    metrics: MindMetrics,
    relay: RelayMetrics,
) -> AsyncIterator[LocalMind]:
    """The mind with its background tasks running."""
    model = settings.model
    local = await asyncio.to_thread(_tokenizer, settings)
    remote = RemoteTokenizer(session, settings.tokens.remote_seconds)
    prompts = PromptSource(local, remote, metrics, verify=model.verify_cases > 0)
    secret = _secret(settings.tenant.secret_file)
    finder = ResponseFinder(session, settings.tokens.remote_seconds)
    mind = LocalMind(
        settings, policy(settings.policy, settings.weights), prompts, metrics, secret, finder=finder
    )
    fleet = _fleet(settings, mind, session, metrics, relay)

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
    relay: RelayMetrics,
) -> Fleet:
    link = _link(settings)
    silent = settings.index.silent_seconds
    reader = FeedReader(session, link, silent, mind.feed_message, time.monotonic, Random(), metrics)
    acknowledger = DrainAcknowledger(session, link, silent)
    health = HealthChecker(session, settings.health)
    return Fleet(mind, settings.index, reader, acknowledger, health, metrics, relay.keep)
