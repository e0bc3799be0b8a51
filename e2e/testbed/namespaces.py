"""The bed's own network, mount and process namespaces.

Every program of the bed lives under one first process, whose end ends all of them, containers too, and with
them goes every mount, address and packet filter they made. So `down` is exact, also after a crash: it ends
that one process, known by its pid and start time, or by its environment when the record of it was lost.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from testbed.bed import Bed
from testbed.waiting import until

MARK = "KVIST_E2E_BED"
# Folders whose place is built into containerd, the CNI library or kubelet: the bed has its own, in memory.
MADE = ("/var/lib/cni", "/var/lib/kubelet")
PRIVATE = ("/run", "/var/log", *MADE)
# Ignoring SIGCHLD makes the kernel reap orphans.
FIRST = """for folder in "$@"; do mkdir -p $folder; mount -t tmpfs tmpfs $folder; done
exec env --ignore-signal=CHLD sleep infinity"""


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one with its number."""

    pid: int
    started: int
    """Start time in clock ticks since boot."""


def open_namespaces(bed: Bed) -> Process:
    """Start the first process and return it once the namespaces are complete."""
    flags = ["--net", "--mount", "--propagation=private", "--pid", "--fork", "--mount-proc"]
    log = bed.log / "first.log"
    with log.open("w") as output:
        subprocess.run(
            ["setsid", "--fork", "unshare", *flags, "sh", "-ec", FIRST, "first", *PRIVATE],
            env={**os.environ, MARK: str(bed.state)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=True,
        )
    until("the namespaces", lambda: any(map(complete, strays(bed))), 10, log.read_text)
    return strays(bed)[0]


def complete(first: Process) -> bool:
    """Whether the first process has made its mounts."""
    return Path(f"/proc/{first.pid}/comm").read_text() == "sleep\n"


def describe(pid: int, proc: Path = Path("/proc")) -> Process:
    """A process with its start time. FileNotFoundError when it is gone."""
    fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    if fields[0] == "Z":
        raise FileNotFoundError(f"process {pid} has ended")
    return Process(pid, int(fields[19]))


def alive(process: Process, proc: Path = Path("/proc")) -> bool:
    """Whether it is still this process."""
    try:
        return describe(process.pid, proc) == process
    except OSError:
        return False


def inside(first: Process) -> Path:
    """The bed's /proc, seen from the machine."""
    return Path(f"/proc/{first.pid}/root/proc")


def entering(first: Process, *command: str) -> list[str]:
    """The command, run inside."""
    return ["nsenter", f"--target={first.pid}", "--net", "--mount", "--pid", "--", *command]


def strays(bed: Bed) -> list[Process]:
    """First processes of this bed, found by their environment."""
    return marked(f"{MARK}={bed.state}\0")


def marked(text: str) -> list[Process]:
    """First processes whose environment holds the text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            held = text.encode() in (folder / "environ").read_bytes()
            if held and f"NSpid:\t{folder.name}\t1\n" in (folder / "status").read_text():
                found.append(describe(int(folder.name)))
        except OSError:
            continue  # it ended while we looked
    return found


def close_namespaces(first: Process) -> None:
    """End everything inside. The kernel reaps all of it before the first process counts as ended."""
    if alive(first):
        os.kill(first.pid, signal.SIGKILL)
    until(f"the end of process {first.pid}", lambda: not alive(first), 60)
