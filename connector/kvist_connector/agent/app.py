"""Composition root of the agent: settings in, a running process out."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from kvist_connector import __version__, names
from kvist_connector import settings as configuration
from kvist_connector.agent.access import Access
from kvist_connector.agent.agent import Agent
from kvist_connector.agent.control_socket import ControlSocket
from kvist_connector.agent.http import runner_of
from kvist_connector.agent.limits import allow_open_files
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.agent.token_file import TokenFile
from kvist_connector.errors import ConfigError
from kvist_connector.log_lines import log_to_stderr
from kvist_connector.tls import LiveContext

log = logging.getLogger(__name__)

_EXAMPLES = """examples:
  python -m kvist_connector --replica r0 --socket /run/kvist/r0.sock --arena /dev/shm/r0.arena --memory 4Gi
  python -m kvist_connector --config agent.yaml --disk.path /var/cache/kvist --disk.size 100Gi
  KVIST_AGENT_MEMORY=0 python -m kvist_connector --config agent.yaml     # index only
  python -m kvist_connector drain --help                                 # before its engine goes

A flag wins over its environment variable (in brackets), a variable over the file, where --disk.size
is disk: {size: ...}. `kvist-agent` and `python -m kvist_connector` are the same program."""
_EXIT_CONFIG = 2
_EXIT_FAILED = 1
_THREADS = 4
_LOOK_SECONDS = 1.0
# Seconds for everything but write-behind when the agent ends.
_CLOSING = 5.0


def run(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""
    parser = configuration.program_parser(
        "python -m kvist_connector",
        "Kvist cache agent: one per engine replica, owns the arena and the tiers below it.",
        _EXAMPLES,
        f"kvist-agent {__version__}",
    )
    configuration.add_flags(parser, AgentSettings, names.ENV_AGENT)
    given = parser.parse_args(arguments)
    try:
        settings = configuration.load(AgentSettings, given, os.environ, names.ENV_AGENT)
        if given.print_config:
            sys.stdout.write(configuration.to_yaml(settings))
            return 0
        log_to_stderr(logging.INFO)
        return asyncio.run(_serve(settings))
    except ConfigError as error:
        sys.stderr.write(f"kvist-agent: {error}\n")
        return _EXIT_CONFIG


async def _serve(settings: AgentSettings) -> int:
    allow_open_files()
    http = settings.http
    tls = LiveContext("server", settings.tls, "tls") if settings.tls.used else None
    access = Access(
        _token("http.token_file", http.token_file),
        _token("http.read_token_file", http.read_token_file),
        certificates=tls is not None and settings.tls.clients == "certificate",
    )
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="bytes") as threads:
        agent = Agent(settings, threads, access)
        control = ControlSocket(settings.socket)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, agent.supervisor.stopping.set)
        runner = runner_of(agent.application())
        peers, peer_port = None, 0
        try:
            agent.claim()
            await runner.setup()
            port = await _listen(runner, "http", http.host, http.port, tls)
            await control.listen(runner)
            await agent.start()
            if tls is not None:
                agent.supervisor.daemon("certificates", _followed(tls))
            if settings.peer.host is not None:
                peers = runner_of(agent.peer_application())
                await peers.setup()
                peer_port = await _listen(peers, "peer", settings.peer.host, settings.peer.port, tls)
                agent.peer_port(peer_port)
            _settle_collector()
            _announce(settings, port, peer_port)
            await agent.supervisor.stopping.wait()
            _end_within(settings.shutdown_deadline + _CLOSING)
            await agent.drain()
        finally:
            agent.end_streams()
            if peers is not None:
                await peers.cleanup()
            await runner.cleanup()
            control.remove()
            await agent.close()
    return _EXIT_FAILED if agent.supervisor.failed else 0


def _settle_collector() -> None:
    """Lookups wait for collections: those of young objects are short (0.6 ms), whole ones are rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 20, 100)


def _end_within(seconds: float) -> None:
    """Threads in a hung file system cannot be stopped, and neither can a process that waits for them."""

    def end() -> None:
        log.error("something does not come back within %g s of the end: ending without it", seconds)
        os._exit(_EXIT_FAILED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _token(setting: str, path: Path | None) -> TokenFile | None:
    return TokenFile(path, setting) if path is not None else None


async def _followed(tls: LiveContext) -> None:
    """A listener's context is made once: new files are looked for."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        await asyncio.to_thread(tls)


async def _listen(runner: web.AppRunner, section: str, host: str, port: int, tls: LiveContext | None) -> int:
    site = web.TCPSite(runner, host, port, ssl_context=None if tls is None else tls())
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(f"{section}.port: {host}:{port} cannot be used: {error.strerror}") from error
    taken: int = runner.addresses[0][1]
    return taken


def _announce(settings: AgentSettings, port: int, peer_port: int) -> None:
    # One line on stdout, so that whoever started us with port 0 can learn the port.
    scheme = "https" if settings.tls.used else "http"
    peer = f"peer={scheme}://{settings.peer.host}:{peer_port} " if peer_port else ""
    sys.stdout.write(
        f"kvist-agent {__version__} ready: replica={settings.replica} socket={settings.socket} "
        f"http={scheme}://{settings.http.host}:{port} {peer}at={time.time():.3f}\n"
    )
    sys.stdout.flush()
