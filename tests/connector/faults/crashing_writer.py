"""A program that stores one chunk on disk and is killed at the n-th step of it; run by test_disk_crashes.py.

    python crashing_writer.py FOLDER FSYNC OPERATION

For every step of the operation and both its sides it forks a child that kills itself there,
in a folder of its own, `FOLDER/<step>-<side>`, which holds one whole chunk already. Steps are the calls to
the operating system, found by counting them; of a write a part may be done. Prints a line for each child.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvist_connector.tiers.base import Sealed
from kvist_connector.tiers.disk import DiskStore

CALLS = ("open", "writev", "lseek", "fdatasync", "close", "rename", "unlink", "mkdir")
SIDES = ("before", "amid", "after")
LIMIT = 1 << 24
OLD, NEW = b"\x01" * 16, b"\x02" * 16  # in different folders


def content(key: bytes) -> bytes:
    """As long as several pages, different for each key."""
    return b"".join(key + number.to_bytes(4, "big") for number in range(1000))


def sealed(data: bytes) -> Sealed:
    """Parts whose first is written last."""
    return Sealed(100, [data[100:]], lambda piece: None, lambda: data[:100])


class Killer:
    """Stands before the operating system's calls; `fatal` is the step at which the process dies."""

    def __init__(self, fatal: int, side: str) -> None:
        self.names: list[str] = []
        self._fatal, self._side = fatal, side
        for name in CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.names.append(name)
            if len(self.names) != self._fatal:
                return real(*arguments, **options)
            if self._side == "amid" and name == "writev":
                real(arguments[0], [bytes(arguments[1][0])[: len(arguments[1][0]) // 2]])
            if self._side == "after":
                real(*arguments, **options)
            return os.kill(os.getpid(), signal.SIGKILL)

        return call


async def prepare(folder: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        store = await DiskStore.open(folder, LIMIT, "none", threads)
        await store.put_if_absent(OLD, [content(OLD)])
        await store.close()


async def operate(folder: Path, fsync: Any, operation: str, fatal: int, side: str) -> list[str]:
    """The steps that were taken, when none of them was fatal."""
    with ThreadPoolExecutor(1) as threads:
        store = await DiskStore.open(folder, LIMIT, fsync, threads)
        killer = Killer(fatal, side)
        if operation == "put":
            await store.put_if_absent(NEW, [content(NEW)[:100], content(NEW)[100:]])
        elif operation == "put sealed":
            await store.put_if_absent(NEW, sealed(content(NEW)))
        else:
            await store.delete(OLD)
        return killer.names


def child(folder: Path, fsync: str, operation: str, fatal: int, side: str) -> bool:
    """Fork; whether the child was killed."""
    asyncio.run(prepare(folder))
    pid = os.fork()
    if pid == 0:
        try:
            names = asyncio.run(operate(folder, fsync, operation, fatal, side))
            print(f"{folder} lived {' '.join(names)}", flush=True)
        finally:
            os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    if killed:
        print(f"{folder} killed {side}", flush=True)
    return killed


def main() -> None:
    root, fsync, operation = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    for side in SIDES:
        step = 1
        while child(root / f"{step}-{side}", fsync, operation, step, side):
            step += 1


if __name__ == "__main__":
    main()
