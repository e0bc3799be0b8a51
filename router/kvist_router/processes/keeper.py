"""The keeper: starts mind and relays, replaces what ends, adds metrics up, and ends all in order.

    SIGTERM   relays say so (`/readyz`), requests are taken for the grace time
    then      the port closes, running answers have the drain time
    then      the mind ends, which has answered relays until the last one

Each further signal skips to the next step. Called by app.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvist_connector.errors import ConfigError
from kvist_router.metrics import TaskMetrics
from kvist_router.mind.supervise import background
from kvist_router.processes.channel import Answer, Begin, Done, Question, Scrape, Step, Text, Use, Wrong
from kvist_router.processes.family import Family, added, bounded, families_of, lasting, text_of
from kvist_router.processes.folder import SOCKET, socket_folder
from kvist_router.processes.post import Post
from kvist_router.processes.stand_in import stand_in
from kvist_router.relay_side import server_tls
from kvist_router.reload import ConfigFile, Reloader, reloading
from kvist_router.server import BACKLOG, listen, url_of
from kvist_router.settings import RouterSettings
from kvist_router.stopping import at_signals
from kvist_router.tls import TlsSettings

PULSE_SECONDS = 2.0  # between two looks at each process, and the deadline of one for a scrape
STEP_SECONDS = 2.0  # until a child has heard of a step
END_SECONDS = 5.0  # beyond the drain time, until a child is killed
USE_SECONDS = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sockets:
    """What children inherit; `path` is a descriptor by which relays find the mind's socket.

    Folders for temporary files are emptied now and then: by its name the next mind would not be found.
    """

    endpoint: socket.socket
    admin: socket.socket
    mind: socket.socket
    path: int


class KeeperMetrics:
    """Of the processes themselves."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.up = Gauge(
            "kvist_router_processes", "The router's processes that serve.", ["process"], registry=registry
        )
        self.restarts = Counter(
            "kvist_router_process_restarts_total",
            "Processes of the router that ended and were replaced.",
            ["process"],
            registry=registry,
        )
        self._counted: dict[str, int] = {}

    def restarted(self, role: str, total: int) -> None:
        """So many were replaced until now."""
        self.restarts.labels(role).inc(total - self._counted.get(role, 0))
        self._counted[role] = total


class Keeper:
    """`posts` are the mind and the relays. `keeping` makes one that runs."""

    def __init__(self, settings: RouterSettings, relays: int, sockets: Sockets) -> None:
        self._settings = settings
        self._sockets = sockets
        self._registry = CollectorRegistry()
        self.tasks = TaskMetrics(self._registry)
        self._metrics = KeeperMetrics(self._registry)
        self._left: list[Family] = []
        self._closed = asyncio.Event()
        self._grace: asyncio.TimerHandle | None = None
        self._steps: set[asyncio.Task[None]] = set()
        self.mind = self._post("mind", "mind", [sockets.admin, sockets.mind], [])
        self.relays = [
            self._post("relay", f"relay {number}", [sockets.endpoint], [sockets.path])
            for number in range(1, relays + 1)
        ]

    @property
    def posts(self) -> list[Post]:
        """All of them."""
        return [self.mind, *self.relays]

    async def start(self) -> None:
        """All processes serve; raises ConfigError."""
        try:
            await asyncio.gather(*(post.start() for post in self.posts))
        except (ConnectionError, TimeoutError) as error:
            raise ConfigError(f"relays: a process of the router did not start: {error}") from error

    async def run(self) -> None:
        """Keep all until the end."""
        limits = self._settings.limits
        try:
            async with asyncio.TaskGroup() as group:
                for post in self.posts:
                    group.create_task(post.keep())
                watching = [
                    group.create_task(post.watch(limits.hung_seconds, PULSE_SECONDS)) for post in self.posts
                ]
                await self._closed.wait()
                await self._end(limits.drain_seconds + END_SECONDS)
                for task in watching:
                    task.cancel()
        finally:
            for step in self._steps:
                step.cancel()
            await asyncio.gather(*self._steps, return_exceptions=True)

    async def run_until_signal(self) -> None:
        """The same, until SIGTERM or SIGINT."""
        with at_signals(self.stop):
            await self.run()

    def stop(self) -> None:
        """The next step towards the end: grace, drain, at once."""
        if self._grace is None:
            seconds = self._settings.grace_seconds
            _log.info("stopping: requests are taken for %g s more", seconds)
            self._step("stopping")
            self._grace = asyncio.get_running_loop().call_later(seconds, self._close)
            if seconds > 0:
                return
        self._grace.cancel()
        self._close()

    async def use(self, settings: RouterSettings) -> None:
        """Other settings in all processes; raises ConfigError, and then all have the old ones."""
        before, self._settings = self._settings, settings  # of a child that starts meanwhile, too
        old, changed = Use(_json(before)), Use(_json(settings))
        for number, post in enumerate(self.posts):
            answer = await post.tell(changed, USE_SECONDS)
            if isinstance(answer, Wrong):
                for told in self.posts[: number + 1]:
                    await told.tell(old, USE_SECONDS)
                self._settings = before
                raise ConfigError(answer.problem)

    async def text(self) -> bytes:
        """Metrics of all processes, in Prometheus' text form."""
        found = await asyncio.gather(*(post.pulse(PULSE_SECONDS) for post in self.posts))
        for role, posts in (("mind", [self.mind]), ("relay", self.relays)):
            self._metrics.up.labels(role).set(sum(post.up for post in posts))
            self._metrics.restarted(role, sum(post.restarts for post in posts))
        return text_of(added([families_of(self._registry), *found, self._left]))

    def _post(self, role: str, name: str, sockets: list[socket.socket], more: list[int]) -> Post:
        def left(families: list[Family]) -> None:
            self._left = bounded(added([self._left, lasting(families)]))

        return Post(role, name, sockets, more, self._begin, self._answer, left, Random())

    def _begin(self) -> Begin:
        # Of a relay that runs, if there is one: without it a new one knows no replica while the mind is away.
        views = [post.view for post in sorted(self.relays, key=lambda post: post.up) if post.view]
        return Begin(
            _json(self._settings), f"/proc/self/fd/{self._sockets.path}", views[-1] if views else None
        )

    async def _answer(self, question: Question) -> Answer:
        return Text(await self.text()) if isinstance(question, Scrape) else Done()

    def _close(self) -> None:
        """Drain; the second call ends running answers at once."""
        again = self._closed.is_set()
        _log.info("ending running answers" if again else "closed: running answers may end")
        # Ours first: what came in while only we still listened would find nobody.
        self._sockets.endpoint.close()
        self._step("now" if again else "close")
        self._closed.set()

    async def _end(self, seconds: float) -> None:
        await asyncio.gather(*(post.gone(seconds) for post in self.relays))
        await self.mind.end("close", STEP_SECONDS)
        await self.mind.end("now", STEP_SECONDS)
        await self.mind.gone(END_SECONDS)

    def _step(self, step: Step) -> None:
        for post in self.relays:
            task = asyncio.create_task(post.end(step, STEP_SECONDS))
            self._steps.add(task)
            task.add_done_callback(self._steps.discard)


@dataclass(frozen=True, slots=True)
class RunningProcesses:
    """A router of several processes; `keeper.run()` keeps it."""

    keeper: Keeper
    url: str
    admin_url: str
    reloader: Reloader | None


@asynccontextmanager
async def keeping(
    settings: RouterSettings, relays: int, file: ConfigFile | None = None
) -> AsyncIterator[RunningProcesses]:
    """A keeper whose processes serve; raises ConfigError."""
    admin_tls = settings.tls if settings.tls.admin else TlsSettings()
    with _sockets(settings) as sockets:
        url = url_of(sockets.endpoint, settings.tls.certificate_file is not None)
        admin_url = url_of(sockets.admin, settings.tls.admin)
        keeper = Keeper(settings, relays, sockets)

        async def absent() -> None:
            await stand_in(keeper.mind, sockets.admin, tls, settings.limits, keeper.text)

        try:
            await keeper.start()
            async with (
                server_tls(admin_tls, keeper.tasks) as tls,
                background("admin", absent, keeper.tasks),
                reloading(settings, file, keeper.use, keeper.tasks) as reloader,
            ):
                yield RunningProcesses(keeper, url, admin_url, reloader)
        finally:
            await asyncio.gather(*(post.close() for post in keeper.posts))


@contextmanager
def _sockets(settings: RouterSettings) -> Iterator[Sockets]:
    with ExitStack() as stack:
        endpoint = stack.enter_context(closing(listen(settings.host, settings.port, "port")))
        admin = stack.enter_context(closing(listen(settings.admin_host, settings.admin_port, "admin-port")))
        path = stack.enter_context(socket_folder()) / SOCKET
        mind = stack.enter_context(closing(_unix_listener(path)))
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        stack.callback(os.close, handle)
        yield Sockets(endpoint, admin, mind, handle)


def _unix_listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:  # a path of 108 bytes is too long
        listener.close()
        raise ConfigError(
            f"relays: no socket can be made at {path}: {error}; set TMPDIR to a short path, or relays to 0"
        ) from error
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _json(settings: RouterSettings) -> bytes:
    return settings.model_dump_json().encode()
