"""Ports that are named before a server listens on them."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from kvist_connector.testing.ports import free_port, free_ports

ROOT = Path(__file__).parents[2]


def test_no_outgoing_connection_gets_one() -> None:
    first_handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < first_handed_out for port in free_ports(50))


def test_runs_do_not_overlap() -> None:
    runs = free_ports(50, run=3)
    assert len({port + i for port in runs for i in range(3)}) == 150


def test_a_port_in_use_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_port()
    monkeypatch.setattr("random.SystemRandom.randrange", lambda self, first, end: taken)
    assert free_port() == taken
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", taken))
        with pytest.raises(RuntimeError, match=r"no 1 x 1 free ports between .* of 127\.0\.0\.1"):
            free_port()


@pytest.mark.parametrize("folder", ["bench", "tests", "e2e", "connector", "router", "operator"])
def test_nobody_gives_back_a_port_that_the_kernel_handed_out(folder: str) -> None:
    """A bind to port 0 whose number is read and whose socket is closed before the server comes."""
    asked = re.compile(
        r"with socket\.socket\([^\n]*\) as \w+:\n\s+\w+\.bind\(\([^\n]*, 0\)\)\n[^\n]*getsockname"
    )
    found = [path for path in (ROOT / folder).rglob("*.py") if asked.search(path.read_text())]
    assert found == []
