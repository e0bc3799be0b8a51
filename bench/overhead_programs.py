"""What bench.overhead runs: the mock engines and load (bench/mock, in Go), and the routers between them.

Routers get one part of the processor's cores, engines and load the other: all contestants the same. A router
that could not be started says why.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

from kvist_connector.testing.ports import free_port

SOURCE = Path(__file__).parent / "mock"
BUILD_SECONDS, START_SECONDS, END_SECONDS = 300.0, 60.0, 20.0
LOAD_SECONDS = 900.0
NO_GO = "mock engines and load are written in Go, and `go` is not on PATH: install Go 1.22 or newer"


class NotHereError(Exception):
    """Something that the bench needs is missing; the words say how to get it."""


class NoStartError(Exception):
    """A program did not become ready."""


@dataclass(frozen=True)
class Cores:
    """Which cores are whose."""

    router: tuple[int, ...]
    rest: tuple[int, ...]

    @classmethod
    def split(cls) -> Cores:
        """Half for the router, half for engines and load; with one core they share it."""
        all_of_them = sorted(os.sched_getaffinity(0))
        half = len(all_of_them) // 2
        return cls(tuple(all_of_them[:half] or all_of_them), tuple(all_of_them[half:]))


def build(folder: Path) -> Path:
    """The mock program; raises NotHereError."""
    if shutil.which("go") is None:
        raise NotHereError(NO_GO)
    target = folder / "mock"
    command = ["go", "build", "-trimpath", "-o", str(target), "."]
    subprocess.run(command, cwd=SOURCE, check=True, timeout=BUILD_SECONDS)
    return target


@contextlib.contextmanager
def engines(mock: Path, count: int, cores: Cores) -> Iterator[list[int]]:
    """Ports of so many mock engines, which listen."""
    command = [str(mock), "engine", "--count", str(count)]
    with _started(command, cores.rest, subprocess.PIPE) as process:
        assert process.stdout is not None
        yield [int(process.stdout.readline()) for _ in range(count)]


def load(mock: Path, ports: Sequence[int], cores: Cores, *flags: object) -> dict[str, Any]:
    """The outcome that `mock load` prints."""
    command = [str(mock), "load", "--ports", ",".join(map(str, ports)), *map(str, flags)]
    with _on(cores.rest):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        said, _ = process.communicate(timeout=LOAD_SECONDS)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"mock load ended with {process.returncode}")
    found: dict[str, Any] = json.loads(said)
    return found


class Router:
    """One that runs, with all its processes."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.port = port
        self._process = psutil.Process(process.pid)

    def processor_seconds(self) -> float:
        """Used until now; processes that have ended since are no longer counted."""
        times = [item.cpu_times() for item in self._family()]
        return sum(used.user + used.system for used in times)

    def memory(self) -> int:
        """Bytes in memory, shared ones counted once."""
        return sum(item.memory_full_info().pss for item in self._family())

    def _family(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


@contextlib.contextmanager
def router(command: Sequence[str], ready: str, cores: Cores, log: Path) -> Iterator[Router]:
    """A router that answers 200 at `ready`; raises NoStartError with the end of its log."""
    port = free_port()
    with (
        log.open("wb") as output,
        _started([*command, "--port", str(port)], cores.router, output) as process,
    ):
        try:
            _wait(lambda: _healthy(port, ready), process)
        except NoStartError as error:
            words = " ".join(log.read_text(errors="replace")[-400:].split())
            raise NoStartError(f"{error}: {words}") from error
        yield Router(process, port)


def kvist(urls: Sequence[str], model: Path) -> list[str]:
    """Kvist's own router as it is by default, with local tokens."""
    replicas = [word for url in urls for word in ("--replica", url)]
    return [
        sys.executable, "-m", "kvist_router", *replicas, "--model.path", str(model),
        "--model.verify-cases", "0", "--admin-port", "0", "--log-level", "warning",
    ]  # fmt: skip


def vllm_router(program: Path, urls: Sequence[str], policy: str) -> list[str]:
    """The Rust router of the vLLM project."""
    own = ["--prometheus-port", str(free_port()), "--log-level", "error", "--host", "127.0.0.1"]
    return [str(program), "--worker-urls", *urls, "--policy", policy, *own]


@contextlib.contextmanager
def _started(
    command: Sequence[str], cores: tuple[int, ...], output: int | IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with _on(cores):
        errors = None if output == subprocess.PIPE else output
        process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
    with process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _on(cores: tuple[int, ...]) -> Iterator[None]:
    """What is started inside has these cores: affinity is inherited by every thread from its first moment."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _healthy(port: int, path: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_SECONDS
    while not condition():
        if process.poll() is not None:
            raise NoStartError(f"it ended with {process.returncode}")
        if time.monotonic() > limit:
            raise NoStartError(f"it was not ready within {START_SECONDS:.0f} s")
        time.sleep(0.05)
