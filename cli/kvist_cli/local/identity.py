"""Which process is meant: a pid together with the moment it started, so that a reused pid is noticed.

Linux: /proc. Each program of a cluster leads a session of its own, so its children carry its pid
as session id however many there are.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

from kvist_connector.settings import Settings

# In the environment of every program: its log, which no other program has.
LOG_VARIABLE: Final = "KVIST_PROGRAM_LOG"
_POLL: Final = 0.05
_TRACKER_DEADLINE: Final = 3.0
_KILL_DEADLINE: Final = 10.0


class Identity(Settings):
    """A process that was started once; `start` in clock ticks since boot."""

    pid: int
    start: int
    boot: str


def identify(pid: int) -> Identity | None:
    """The process that has this pid now; None when there is none, or only its corpse."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return Identity(pid=pid, start=int(fields[19]), boot=_boot_id())


def alive(identity: Identity) -> bool:
    """Whether exactly this process still runs."""
    return identify(identity.pid) == identity


def members(leader: Identity) -> list[int]:
    """Living processes of the leader's session; none when its pid belongs to somebody else by now."""
    now = identify(leader.pid)
    if leader.boot != _boot_id() or (now is not None and now != leader):
        return []
    found = []
    for entry in Path("/proc").iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdecimal() else None
        if fields is None or fields[0] in "ZX":
            continue
        if int(fields[3]) == leader.pid and int(fields[19]) >= leader.start:
            found.append(int(entry.name))
    return found


def find_by_log(log: Path) -> Identity | None:
    """The leader of the program that writes this log, also when nobody wrote its pid down."""
    mark = f"{LOG_VARIABLE}={log}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended, or belongs to somebody else
            continue
        fields = _stat(int(entry.name)) if marked else None
        if fields is not None and fields[3] == entry.name:
            return identify(int(entry.name))
    return None


def send(leader: Identity, number: signal.Signals, *, spare_trackers: bool = False) -> None:
    """Signal every process of the session.

    Python's resource trackers remove the shared memory of their dead and then end by themselves:
    whoever kills with SIGKILL spares them first, or memory stays behind in /dev/shm.
    """
    for pid in members(leader):
        if spare_trackers and _is_tracker(pid):
            continue
        # It may end between being listed and being signalled: that is what is wanted.
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end_all(leaders: list[Identity], deadline: float) -> None:
    """SIGTERM to all sessions, after `deadline` seconds SIGKILL, until none is left."""
    for leader in leaders:
        send(leader, signal.SIGTERM)
    if not _gone(leaders, deadline):
        for leader in leaders:
            send(leader, signal.SIGKILL, spare_trackers=True)
        if not _gone(leaders, _TRACKER_DEADLINE):
            for leader in leaders:
                send(leader, signal.SIGKILL)
            _gone(leaders, _KILL_DEADLINE)


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _gone(leaders: list[Identity], deadline: float) -> bool:
    end = time.monotonic() + deadline
    while any(members(leader) for leader in leaders):
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL)
    return True


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on: state, parent, group, session, ..."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses and may hold anything.
    return text[text.rindex(")") + 2 :].split()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
