"""An agent for an engine that was given none. Torch-free.

Every process of the engine calls `ensure_agent`; the first that takes the lock in the
folder spawns `python -m kvist_connector` in a session of its own and as nobody's child, so
that it outlives the engine and a restarted engine finds its cache warm. The agent exits by
itself after minutes without connections. While an engine runs, `Reviver` replaces an agent
that died.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvist_connector.errors import ConfigError

logger = logging.getLogger(__name__)
IDLE_EXIT = 300  # seconds without connections
START_DEADLINE = 60.0
MAX_SOCKET_PATH = 107  # bytes, Linux's sockaddr_un
REVIVE_PAUSE = 10.0  # seconds; an agent that dies at once is not started in a tight loop
# Starts the agent and ends: an engine that stops kills all of its own descendants.
LAUNCHER = """
import subprocess, sys
print(subprocess.Popen(sys.argv[1:], stdout=sys.stderr, start_new_session=True).pid)
"""


@dataclass(frozen=True)
class SpawnSettings:
    """What a spawned agent is given."""

    folder: Path
    memory: int | str
    disk: str | None = None
    disk_size: int | None = None
    idle_exit: float = IDLE_EXIT

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.folder / "agent.sock"

    @property
    def arena(self) -> Path:
        """The arena's file."""
        return self.folder / "agent.arena"

    @property
    def log(self) -> Path:
        """Its output."""
        return self.folder / "agent.log"

    def command(self) -> list[str]:
        """The agent's command line."""
        command = [
            sys.executable, "-m", "kvist_connector", "--replica", "local",
            "--socket", str(self.socket), "--arena", str(self.arena), "--memory", str(self.memory),
            "--http.port", "0", "--idle-exit", str(self.idle_exit),
        ]  # fmt: skip
        if self.disk is not None:
            command += ["--disk.path", self.disk]
        if self.disk_size is not None:
            command += ["--disk.size", str(self.disk_size)]
        return command


def ensure_agent(settings: SpawnSettings, deadline: float = START_DEADLINE) -> Path:
    """The socket of a running agent; spawns one when none answers. Returns before it is ready.

    The lock is held, by a thread, until the agent listens, so no second one is spawned meanwhile.
    """
    if len(os.fsencode(settings.socket)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"kv_connector_extra_config.folder: {settings.folder} is too long: the path of a socket in it "
            f"may have {MAX_SOCKET_PATH} bytes; choose a shorter one"
        )
    try:
        settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _refuse_foreign(settings.folder)
        lock = os.open(settings.folder / "spawn.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"kv_connector_extra_config.folder: {settings.folder} cannot be used: {error.strerror}; "
            "give a folder that this user can write"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return settings.socket  # somebody else is spawning it
    if listening(settings.socket):
        os.close(lock)
        return settings.socket
    try:
        agent = _spawn(settings, deadline)
    except OSError:
        os.close(lock)
        raise
    threading.Thread(
        target=_hold_until_listening, args=(lock, agent, settings, deadline), daemon=True
    ).start()
    return settings.socket


class Reviver:
    """Called by a client whose agent does not listen: spawns another one, not too often.

    Never raises: an engine without its agent serves uncached.
    """

    def __init__(self, settings: SpawnSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._after = clock() + REVIVE_PAUSE  # the first one was spawned at start

    def __call__(self) -> None:
        """Spawn an agent unless one listens, is being spawned, or was spawned a moment ago."""
        if self._clock() < self._after:
            return
        self._after = self._clock() + REVIVE_PAUSE
        try:
            ensure_agent(self._settings)
        except (ConfigError, OSError) as error:
            logger.error("the Kvist agent is gone and cannot be started again: %s", error)


def _refuse_foreign(folder: Path) -> None:
    """Whoever owns the folder answers for the agent: with KV that it likes, and it sees ours.

    Where everybody may write, as in /dev/shm, anybody can make the folder first that another user's is in.
    """
    shared = folder.parent.parent.stat().st_mode & stat.S_IWOTH
    for place in (folder, folder.parent) if shared else (folder,):
        for status in (place.lstat(), place.stat()):
            if status.st_uid not in (os.geteuid(), 0):
                raise ConfigError(
                    f"kv_connector_extra_config.folder: {place} belongs to another user ({status.st_uid}): "
                    "remove it or give another folder"
                )


def listening(path: Path) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _spawn(settings: SpawnSettings, deadline: float) -> int:
    """The agent's pid."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVIST_AGENT_")}
    with settings.log.open("ab") as log:
        try:
            launched = subprocess.run(
                [sys.executable, "-I", "-S", "-c", LAUNCHER, *settings.command()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                timeout=deadline,
                check=True,
            )
        except subprocess.SubprocessError as error:
            raise OSError(f"the Kvist agent was not started, see {settings.log}: {error}") from error
    return int(launched.stdout)


def _ended(pid: int) -> bool:
    """Whether a process is gone, or waits to be reaped by whose child it has become."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return status.rpartition(b")")[2].split()[0] in (b"Z", b"X")


def _hold_until_listening(lock: int, agent: int, settings: SpawnSettings, deadline: float) -> None:
    end = time.monotonic() + deadline
    pause = threading.Event()
    try:
        while time.monotonic() < end and not _ended(agent) and not listening(settings.socket):
            pause.wait(0.05)
        if _ended(agent):
            logger.error("the Kvist agent ended as it started; %s says why", settings.log)
    finally:
        os.close(lock)
