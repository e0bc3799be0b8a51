"""What outlives the namespaces: cgroups, and folders on the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from testbed.bed import Bed, BedError
from testbed.namespaces import MADE, MARK, marked
from testbed.waiting import until

CGROUPS = Path("/sys/fs/cgroup")


def remove_cgroups(bed: Bed) -> None:
    """The containers' cgroups. The kernel takes a moment to let go of ended processes."""
    until(
        "removing cgroups",
        lambda: not [group for group in cgroups(bed) if not removed(group)],
        30,
        lambda: f"Left: {', '.join(map(str, cgroups(bed)))}",
    )
    for parent in parents():
        with contextlib.suppress(OSError):  # another containerd's are in it
            os.rmdir(parent)


def cgroups(bed: Bed) -> list[Path]:
    """Those of the bed's containers, under every controller, and no other's in the same parents."""
    names = [folder.name for folder in bed.containers.iterdir()] if bed.containers.is_dir() else []
    return [group for parent in parents() for name in names if (group := parent / name).is_dir()]


def parents() -> list[Path]:
    """Where containerd puts the containers of its namespace k8s.io: cgroups of version 1 or 2."""
    return [top for top in (CGROUPS / "k8s.io", *CGROUPS.glob("*/k8s.io")) if top.is_dir()]


def removed(top: Path) -> bool:
    """Remove a cgroup, innermost first; False when a process still ends in it."""
    for folder, _, _ in os.walk(top, topdown=False):
        try:
            os.rmdir(folder)
        except OSError:
            return False
    return True


def remove_folders(bed: Bed) -> None:
    """The state, unless something is mounted there, and the mount points it made if they are empty."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    under = [path for path in mounted if Path(path).is_relative_to(bed.state)]
    if under:
        raise BedError(f"{under[0]} is a mount in the bed's folder that the bed did not make; unmount it")
    if bed.state.exists():
        shutil.rmtree(bed.state)
    # Removing a mount point takes the mount away from every namespace, another bed's too.
    for path in MADE if not marked(f"{MARK}=") else ():
        with contextlib.suppress(OSError):
            os.rmdir(path)
