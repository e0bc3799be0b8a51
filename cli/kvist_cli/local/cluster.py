"""The Python API of a local cluster: a blocking front over the supervisor's own thread.

Called by `kvist up` and `kvist demo`. Programs are named `agent-0`, `engine-0`, ..., `router`;
replicas `replica-0`, ... Every wait has a deadline; every failure is a ClusterError in words.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from kvist_cli.local import leftovers
from kvist_cli.local.events import Event, EventKind, OnEvent, ignore
from kvist_cli.local.keeper import ClusterError
from kvist_cli.local.options import Options
from kvist_cli.local.prepare import keep_tenant_secret, prepare, run_folder
from kvist_cli.local.state import Lock, ProgramState, RunFolder
from kvist_cli.local.supervisor import Supervisor
from kvist_connector.errors import ConfigError
from kvist_operator.plan import Role
from kvist_operator.plan.access import has_keys
from kvist_operator.render.local import Process
from kvist_operator.spec import CacheCluster, dump

_SLACK: Final = 60.0
T = TypeVar("T")

__all__ = ["Cluster", "ClusterError", "Urls"]


@dataclass(frozen=True)
class Urls:
    """Base addresses without a trailing slash; engines and agents by replica name."""

    router: str
    router_admin: str
    engines: dict[str, str]
    agents: dict[str, str]  # empty with cache.enabled false


class Cluster:
    """A running cluster, owned by this process. Made by `up` or, from ready processes, by `run`."""

    def __init__(
        self, supervisor: Supervisor, lock: Lock, run_dir: Path, urls: Urls, options: Options
    ) -> None:
        self.run_dir = run_dir
        self.urls = urls
        self._supervisor = supervisor
        self._lock = lock
        self._options = options
        self._down = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvist-supervisor", daemon=True)
        self._thread.start()

    @classmethod
    def up(cls, manifest: CacheCluster, options: Options | None = None, on_event: OnEvent = ignore) -> Self:
        """Check everything, start all programs in order, return when all are healthy.

        Raises ConfigError before anything starts (manifest against machine, ports, model), ClusterError
        when a program does not come up or a cluster of this name runs; nothing is left running then.
        `on_event` is called from the supervisor's thread.
        """
        options = options or Options()
        folder = RunFolder(run_folder(manifest.name, options, os.environ))
        lock = claim(folder, manifest.name, options, on_event)
        try:
            prepared = prepare(manifest, options, os.environ, on_event)
            _keep_files(folder, manifest)
        except BaseException:
            lock.release()
            raise
        return cls.run(
            manifest.name,
            manifest.served_name,
            prepared.processes,
            folder,
            lock,
            options,
            os.environ,
            on_event,
        )

    @classmethod
    def run(
        cls,
        name: str,
        model: str,
        processes: Sequence[Process],
        folder: RunFolder,
        lock: Lock,
        options: Options,
        environment: Mapping[str, str],
        on_event: OnEvent = ignore,
    ) -> Self:
        """Start ready-made processes under a folder whose lock the caller holds, and now gives away."""
        supervisor = Supervisor(name, model, processes, folder, options, environment, on_event)
        cluster = cls(supervisor, lock, folder.path, urls_of(processes), options)
        try:
            cluster._call(supervisor.up(), start_deadline(processes))
        except BaseException as error:
            cluster.down(flush=False)
            if isinstance(error, OSError) and error.errno is not None:
                raise unwritable(folder.path, error) from error
            raise
        return cluster

    def kill(self, program: str) -> int:
        """SIGKILL the program and its children; the supervisor starts it again. Returns the dead pid."""
        return self._call(self._supervisor.kill(program), self._options.stop_deadline)

    def restart(self, program: str, deadline: float = 600.0) -> None:
        """Stop it with SIGTERM, start it again, wait until it is healthy."""
        self._call(self._supervisor.restart(program), deadline)

    def wait_ready(self, program: str, deadline: float = 600.0) -> float:
        """Wait until it is healthy (after kill(): the new process). Returns the seconds its start took."""
        return self._call(self._supervisor.ready(program), deadline)

    def programs(self) -> tuple[ProgramState, ...]:
        """All programs as they are now."""
        return tuple(keeper.state() for keeper in self._supervisor.keepers.values())

    def pid(self, program: str) -> int:
        """Process id of the program now; raises ClusterError while it is not running."""
        identity = self._supervisor.keeper(program).identity
        if identity is None:
            raise ClusterError(f"{program} is not running now")
        return identity.pid

    def log(self, program: str) -> Path:
        """Its log file."""
        return self._supervisor.keeper(program).process.log

    def down(self, *, flush: bool = True, keep_arenas: bool = False) -> None:
        """Stop router and engines, flush agents to disk, stop them, remove the arenas. Safe to call twice.

        With `keep_arenas` the next `up` finds the memory tier warm.
        """
        if self._down:
            return
        deadline = 3 * (self._options.stop_deadline + _SLACK) + self._options.flush_deadline
        self._call(self._supervisor.down(flush=flush, keep_arenas=keep_arenas), deadline)
        self._close()

    def abort(self) -> None:
        """SIGKILL to everything, then clean up; for a user who does not want to wait for down()."""
        self._loop.call_soon_threadsafe(self._supervisor.abort)
        self.down(flush=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down(flush=error is None)

    def _call(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(deadline)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise ClusterError(f"not done within {deadline:.0f} s; see {self.run_dir / 'logs'}") from error
        except BaseException:
            future.cancel()
            raise

    def _close(self) -> None:
        self._down = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._options.stop_deadline)
        self._loop.close()
        self._lock.release()


def claim(folder: RunFolder, name: str, options: Options, on_event: OnEvent) -> Lock:
    """Become the owner of the folder; ends what a killed owner left. Raises ClusterError while one lives."""
    lock = folder.lock()
    if lock is None:
        raise _already_up(folder, name)
    try:
        state = folder.read()
        if state is not None:
            found = ", ".join(p.name for p in leftovers.running(leftovers.found(state))) or "nothing alive"
            on_event(Event(EventKind.NOTE, "", f"cleaning up after a killed supervisor: {found}"))
            leftovers.end(state, folder, options, flush=True, on_event=on_event)
    except BaseException:
        lock.release()
        raise
    return lock


def _keep_files(folder: RunFolder, manifest: CacheCluster) -> None:
    try:
        folder.keep("manifest.yaml", dump(manifest))
        if has_keys(manifest):
            keep_tenant_secret(folder)
    except OSError as error:
        raise unwritable(folder.path, error) from error


def unwritable(path: Path, error: OSError) -> ConfigError:
    """What to say of a run folder that is full or may not be written to."""
    return ConfigError(f"--run-dir: '{path}' cannot be written to: {error.strerror}")


def check_not_up(folder: RunFolder, name: str) -> None:
    """Raise ClusterError while one of this name lives: its own ports would be found taken."""
    if folder.locked():
        raise _already_up(folder, name)


def _already_up(folder: RunFolder, name: str) -> ClusterError:
    state = folder.read()
    pid = f" (pid {state.supervisor.pid})" if state is not None else ""
    return ClusterError(
        f"cluster {name!r} is already up{pid}: see `kvist status {name}`, end it with "
        f"`kvist down {name}`, or give this one another metadata.name and ports"
    )


def start_deadline(processes: Sequence[Process]) -> float:
    """Seconds that a whole start may take: roles wait for each other, programs of one role do not."""
    return sum({p.role: p.start_deadline for p in processes}.values()) + _SLACK


def urls_of(processes: Sequence[Process]) -> Urls:
    """Addresses of a rendered cluster."""
    router = next((p for p in processes if p.role is Role.ROUTER), None)
    admin = router.ports.get("router-admin") if router is not None else None
    return Urls(
        router=router.url if router is not None else "",
        router_admin=f"http://127.0.0.1:{admin}" if admin is not None else "",
        engines={p.replica: p.url for p in processes if p.role is Role.ENGINE},
        agents={p.replica: p.url for p in processes if p.role is Role.AGENT},
    )
