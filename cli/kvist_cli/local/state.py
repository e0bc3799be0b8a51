"""`state.json` in the run folder: who runs, where. Written by the supervisor after every change.

Read by `status`, `down`, the controls and the next `up`. Its lock is held as long as
a supervisor lives, however it dies.
"""

from __future__ import annotations

import fcntl
import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvist_cli.local.identity import Identity
from kvist_connector.errors import ConfigError
from kvist_connector.settings import Settings, brief, validate
from kvist_operator.plan import Role

STATE_FILE: Final = "state.json"
LOCK_FILE: Final = "lock"
VERSION: Final = 1


class Phase(StrEnum):
    """Where a program is in its life."""

    WAITING = "waiting"  # for programs that come before it
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # between an exit and the next start
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"  # given up after too many restarts


class ProgramState(Settings):
    """One program."""

    name: str
    role: Role
    replica: str
    phase: Phase
    identity: Identity | None  # None while it is not running
    restarts: int
    url: str
    ports: dict[str, int]
    log: Path
    arena: Path | None
    message: str


class ClusterState(Settings):
    """One cluster on this machine."""

    version: int
    name: str
    model: str
    supervisor: Identity
    programs: tuple[ProgramState, ...]
    admin_url: str


class RunFolder:
    """The folder of one cluster's run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> ClusterState | None:
        """The last state; None when there never was one. Raises ConfigError for an unreadable file."""
        file = self.path / STATE_FILE
        try:
            data = json.loads(file.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: cannot be read ({error}); remove it if no cluster runs") from error
        version = data.get("version", VERSION) if isinstance(data, dict) else VERSION
        if version != VERSION:
            raise ConfigError(
                f"{file}: format {brief(version)} is not the supported {VERSION}: use the kvist that wrote it"
            )
        return validate(ClusterState, data, str(file))

    def write(self, state: ClusterState) -> None:
        """Replace the state, whole or not at all."""
        self.keep(STATE_FILE, state.model_dump_json(indent=1) + "\n")

    def keep(self, name: str, text: str, mode: int = 0o666) -> None:
        """Write a file of the folder, whole or not at all. Raises OSError."""
        partial = self.path / f".{name}.{os.getpid()}"
        try:
            with open(
                os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "w"
            ) as file:
                file.write(text)
            partial.replace(self.path / name)
        except OSError:
            partial.unlink(missing_ok=True)  # half of it would take room where there is none
            raise

    def forget(self) -> None:
        """Nothing runs any more."""
        (self.path / STATE_FILE).unlink(missing_ok=True)

    def lock(self) -> Lock | None:
        """Become the supervisor of this folder; None while another lives, ConfigError when unusable."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--run-dir: '{self.path}' cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return Lock(fd)

    def locked(self) -> bool:
        """Whether a supervisor lives."""
        try:
            there = (self.path / LOCK_FILE).exists()
        except OSError:  # a name that can be nobody's: whoever makes the folder says so
            there = False
        if not there:
            return False
        lock = self.lock()
        if lock is None:
            return True
        lock.release()
        return False


class Lock:
    """Held until release() or the death of the process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
