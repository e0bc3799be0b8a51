"""What outlives the namespaces: cgroups, and folders on the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from testbed.bed import Bed, BedError
from testbed.namespaces import MADE
from testbed.waiting import until

CGROUPS = Path("/sys/fs/cgroup")


def remove_cgroups(bed: Bed) -> None:
    """The pods' cgroups under every controller. The kernel takes a moment to let go of ended processes."""
    until(
        "removing cgroups",
        lambda: not [top for top in cgroups(bed) if not removed(top)],
        30,
        lambda: f"Left: {', '.join(map(str, cgroups(bed)))}",
    )


def cgroups(bed: Bed) -> list[Path]:
    """Tops of the bed's cgroups, version 1 (one a controller) or 2."""
    return [top for top in (CGROUPS / bed.cgroup, *CGROUPS.glob(f"*/{bed.cgroup}")) if top.is_dir()]


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
    for path in MADE:
        with contextlib.suppress(OSError):
            os.rmdir(path)
