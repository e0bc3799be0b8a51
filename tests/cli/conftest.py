"""Small real programs, and a place for a cluster of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvist_cli.local import Cluster, Event, Options
from kvist_cli.local.cluster import claim
from kvist_cli.local.state import RunFolder
from kvist_connector.testing.ports import free_port
from kvist_operator.plan import Role
from kvist_operator.render.local import Process

FAKE = Path(__file__).with_name("fake_program.py")


@dataclass
class Stage:
    """A run folder and what is made in it."""

    folder: Path
    events: list[Event] = field(default_factory=list)
    listener: Callable[[Event], None] | None = None
    options: Options = field(
        default_factory=lambda: Options(backoff=0.01, restarts=2, stop_deadline=5.0, flush_deadline=5.0)
    )

    @property
    def journal(self) -> list[str]:
        """What the programs wrote, in order."""
        file = self.folder / "journal"
        return file.read_text().splitlines() if file.exists() else []

    def program(
        self, name: str, temper: str = "good", after: tuple[str, ...] = (), deadline: float = 20.0
    ) -> Process:
        """One of the tempers of fake_program.py; its role is the first part of its name."""
        port = free_port()
        role = Role(name.split("-")[0])
        url = f"http://127.0.0.1:{port}"
        argv = (str(port), str(self.folder / "journal"), name, temper, str(self.folder / f"{name}.file"))
        return Process(
            name=name,
            role=role,
            replica="" if role is Role.ROUTER else f"replica-{name.rsplit('-', 1)[-1]}",
            argv=(sys.executable, str(FAKE), *argv),
            env={},
            files={},
            folders=(self.folder / "logs",),
            ports={role.value: port},
            url=url,
            health_url=f"{url}/healthz",
            start_deadline=deadline,
            after=after,
            log=self.folder / "logs" / f"{name}.log",
            arena=self.folder / f"{name}.arena" if role is Role.AGENT else None,
        )

    def run(self, *programs: Process) -> Cluster:
        """Start them."""
        run_folder = RunFolder(self.folder)
        lock = claim(run_folder, "test", self.options, self.events.append)
        listener = self.listener or self.events.append
        return Cluster.run("test", "model", programs, run_folder, lock, self.options, os.environ, listener)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait for something that other processes do; fails after a generous deadline."""

    def wait(condition: Callable[[], bool], deadline: float = 60.0) -> None:
        end = time.monotonic() + deadline
        while not condition():
            assert time.monotonic() < end, "did not happen in time"
            time.sleep(0.02)

    return wait
