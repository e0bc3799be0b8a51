"""Composition root of the router: settings in, servers out. Called by __main__.py only."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import uvloop
import yaml
from prometheus_client import CollectorRegistry

from kvist_connector import names
from kvist_connector.errors import ConfigError
from kvist_connector.settings import add_flags, load, program_parser, to_yaml
from kvist_router.exposition import exposition_of
from kvist_router.logs import configure
from kvist_router.memory import settle_memory
from kvist_router.metrics import RelayMetrics
from kvist_router.mind.mind import LocalMind
from kvist_router.mind_side import mind_side
from kvist_router.processes.cores import cores, default_relays
from kvist_router.processes.keeper import keeping
from kvist_router.relay_side import relay_side
from kvist_router.reload import ConfigFile, Reloader, reloading
from kvist_router.server import Served, Servers, listen
from kvist_router.settings import RouterSettings

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
    """The whole router in this process: background tasks running, ports bound; raises ConfigError.

    `file`: where the settings came from, to be read again when it changes.
    """
    registry = CollectorRegistry()
    exposition, relay_metrics = exposition_of(registry), RelayMetrics(registry)
    with (
        closing(listen(settings.host, settings.port, "port")) as endpoint_socket,
        closing(listen(settings.admin_host, settings.admin_port, "admin-port")) as admin_socket,
    ):
        async with AsyncExitStack() as stack:
            side = await stack.enter_async_context(
                mind_side(settings, registry, exposition, relay_metrics.keep)
            )
            mind, outlook, reader = side.mind, side.outlook, settings.reader
            front = await stack.enter_async_context(
                relay_side(settings, mind, outlook, relay_metrics, mind.metrics, exposition, reader)
            )
            endpoint = Served(front.app, endpoint_socket, front.tls)
            admin = Served(side.admin, admin_socket, front.tls if settings.tls.admin else None)
            servers = Servers([endpoint, admin], settings.limits, settings.grace_seconds, outlook.stop)

            async def use(changed: RouterSettings) -> None:
                await front.use(changed)
                mind.use(changed)

            reloader = await stack.enter_async_context(reloading(settings, file, use, mind.metrics))
            yield Running(mind, servers, endpoint.url, admin.url, reloader)


async def _serve(settings: RouterSettings, file: ConfigFile | None) -> None:
    relays = default_relays(cores()) if settings.relays is None else settings.relays
    if relays:
        async with keeping(settings, relays, file) as kept:
            _announce(kept.url, kept.admin_url, kept.reloader)
            await kept.keeper.run_until_signal()
        return
    async with build(settings, file) as running:
        _announce(running.url, running.admin_url, running.reloader)
        settle_memory()
        await running.servers.run_until_signal()


def _announce(url: str, admin_url: str, reloader: Reloader | None) -> None:
    _log.info("listening on %s, admin on %s", url, admin_url)
    if reloader is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.now)
