"""`e2e/cluster`: a one-node Kubernetes of real parts on this machine, and its exact removal.

`up` and `api-only` start what is missing; after a crash they remove what is left first. `down` ends exactly
what was started here. Root is needed for namespaces, mounts and cgroups.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from testbed.bed import Bed, BedError, bed
from testbed.control_plane import start_control_plane
from testbed.namespaces import PRIVATE, alive, close_namespaces, entering, open_namespaces, strays
from testbed.network import connect, disconnect
from testbed.node import start_node
from testbed.packages import need_packages
from testbed.programs import Catalogue, catalogue
from testbed.record import Record, load, save
from testbed.remains import remove_cgroups, remove_folders
from testbed.running import Runner


def main() -> int:
    """The command line."""
    options = parser().parse_args()
    here, known = bed(), catalogue()
    try:
        refuse_unusable(here)
        if options.action == "status":
            return status(here)
        if options.action == "kubeconfig":
            print(here.kubeconfig)
            return 0
        if options.action == "exec":
            return run_inside(here, options.command)
        with turn(here):
            act(options.action, here, known)
    except BedError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="e2e/cluster", description=__doc__)
    actions = made.add_subparsers(dest="action", required=True)
    actions.add_parser("up", help="the whole node: pods run")
    actions.add_parser("api-only", help="etcd, API server and controller manager: no pods")
    actions.add_parser("down", help="end and remove everything")
    actions.add_parser("status", help="what runs, and the kubeconfig; exit status 3 when nothing does")
    actions.add_parser("kubeconfig", help="print the path of the administrator's kubeconfig")
    inside = actions.add_parser("exec", help="run a command in the bed's namespaces")
    inside.add_argument("command", nargs=argparse.REMAINDER)
    return made


def refuse_unusable(here: Bed) -> None:
    """BedError when the bed cannot work here at all."""
    if os.geteuid() != 0:
        raise BedError("this needs root: it makes namespaces, mounts and cgroups. Run it as root or in a VM")
    if any(here.state.is_relative_to(folder) for folder in PRIVATE):
        raise BedError(
            f"KVIST_E2E_STATE={here.state} lies in a folder the bed covers; choose another than {PRIVATE}"
        )


def act(action: str, here: Bed, known: Catalogue) -> None:
    """One action, with nobody else acting."""
    began = time.monotonic()
    if action == "down":
        down(here)
    else:
        group = "api" if action == "api-only" else "node"
        up(here, known, group)
        print(f"export KUBECONFIG={here.kubeconfig}")
    print(f"cluster: {action} took {time.monotonic() - began:.1f} s", file=sys.stderr)


def up(here: Bed, known: Catalogue, group: str) -> None:
    """Start what is missing."""
    missing = [name for name in known.wanted(group) if not known.path(name).is_file()]
    if missing:
        raise BedError(f"not built yet: {', '.join(missing)}. Run e2e/build --group {group}")
    need_packages(group)
    record = load(here)
    if record is None or record.dead():
        down(here)
        record = begin(here)
    runner = Runner(here, known, record)
    start_control_plane(runner)
    if group == "node":
        start_node(runner)


def begin(here: Bed) -> Record:
    """Empty namespaces with their link."""
    here.log.mkdir(parents=True, mode=0o700)
    record = Record(open_namespaces(here))
    save(here, record)
    connect(here, record.first)
    return record


def down(here: Bed) -> None:
    """Remove everything. Nothing to remove is no error."""
    record = load(here)
    recorded = [record.first] if record and alive(record.first) else []
    for first in {*recorded, *strays(here)}:
        close_namespaces(first)
    disconnect(here)
    remove_cgroups(here)
    remove_folders(here)


def status(here: Bed) -> int:
    """Print what runs. 0: all that was started; 1: something has ended; 3: nothing."""
    record = load(here)
    if record is None or not alive(record.first):
        print("cluster: down")
        return 3
    dead = record.dead()
    for name in record.programs:
        print(f"{name}\t{'ended, see ' + str(here.log / name) + '.log' if name in dead else 'runs'}")
    print(f"export KUBECONFIG={here.kubeconfig}")
    return 1 if dead else 0


def run_inside(here: Bed, command: list[str]) -> int:
    """Become a command in the namespaces."""
    record = load(here)
    if record is None or not alive(record.first):
        raise BedError("it is down; run e2e/cluster up")
    words = entering(record.first, *(command or ["bash"]))
    os.execvp(words[0], words)


@contextmanager
def turn(here: Bed) -> Iterator[None]:
    """One `up` or `down` at a time. The lock lies beside the state, which `down` removes."""
    here.state.parent.mkdir(parents=True, exist_ok=True)
    with here.state.with_name(f".{here.state.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
