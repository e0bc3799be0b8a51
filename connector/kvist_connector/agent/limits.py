"""What this process may take: memory of the machine and its control group, open files."""

from __future__ import annotations

import resource
from pathlib import Path

from kvist_connector.errors import ConfigError

# Connections of engines, feed readers and controls, each a file.
_FEWEST_FILES = 256
_MOST_FILES = 65536


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes; the least of what applies, None where nothing can be told."""
    known = [found for found in (_machine(proc), _group(proc, cgroups)) if found is not None]
    return min(known, default=None)


def _machine(proc: Path) -> int | None:
    lines = _read(proc / "meminfo").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _group(proc: Path, cgroups: Path) -> int | None:
    """Room below memory.max of our group and of every group around it (control groups, version 2)."""
    path = next(
        (line[3:] for line in _read(proc / "self" / "cgroup").splitlines() if line.startswith("0::")), None
    )
    if path is None:
        return None
    folder = cgroups / path.lstrip("/")
    rooms = []
    for group in (folder, *folder.parents):
        limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            rooms.append(max(0, int(limit) - int(used) + _reclaimable(group)))
        if group == cgroups:
            break
    return min(rooms, default=None)


def _reclaimable(group: Path) -> int:
    """Cached files count as used, but give way."""
    fields = dict(line.split() for line in _read(group / "memory.stat").splitlines() if line.count(" ") == 1)
    return sum(int(fields.get(name, 0)) for name in ("active_file", "inactive_file"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def allow_open_files() -> None:
    """Raise our limit as far as we may; raises ConfigError where it stays too low to serve anybody."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if most < _FEWEST_FILES:
        raise ConfigError(
            f"open files: a limit of {most} is too low, at least {_FEWEST_FILES} are needed: "
            "raise it with `ulimit -n`, or the service manager's limit"
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
