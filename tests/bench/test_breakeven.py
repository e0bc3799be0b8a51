"""The link of the break-even bench is as slow as it says, and what was measured in pieces is one table."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import breakeven, harness
from bench.link import BURST, Link


def send(listening: socket.socket, data: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.sendall(data)


def test_a_link_is_no_faster_than_its_rate_and_changes_nothing() -> None:
    data = b"".join(number.to_bytes(4, "big") for number in range(150_000))
    with socket.create_server(("127.0.0.1", 0)) as server, Link(server.getsockname()[1], rate=1e6) as link:
        thread = threading.Thread(target=send, args=(server, data))
        thread.start()
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", link.port)) as client:
            found = b"".join(iter(lambda: client.recv(65536), b""))
        assert time.monotonic() - began >= (len(data) - BURST) / 1e6
        thread.join()
    assert found == data


def test_points_measured_in_pieces_are_one_table(tmp_path: Path) -> None:
    slow = breakeven.Point(1, 256, planned=[2.0, 2.2, 2.1], never=[2.0, 2.0, 2.0], loaded=[0, 0, 0])
    fast = breakeven.Point(500, 256, [1.0] * 3, [1.0] * 3, [4.0] * 3, [256] * 3)
    for point in (fast, slow):
        (tmp_path / f"{point.name}.json").write_text(json.dumps(asdict(point)))
    flags = ["--pieces", str(tmp_path), "--point", "1:256", "--point", "500:256", "--check"]
    results: list[harness.Result] = []

    def run(options: harness.Options) -> harness.Result:
        """Nothing is measured: every point is there."""
        results.append(breakeven.run(options))
        return results[0]

    assert harness.main("breakeven", run, breakeven._arguments, flags) == 0
    (result,) = results
    assert [row[:6] for row in result.tables[0].rows] == [
        ("1", "256", "2.10", "-", "2.00", "0"),
        ("500", "256", "1.00", "1.00", "4.00", "256"),
    ]
    assert [goal.name for goal in result.goals] == [
        "1 MB/s, 256 tokens: planned / never",
        "500 MB/s, 256 tokens: planned / always",
    ]


@pytest.mark.parametrize("point", ["15", "15:", "x:256", "15:-1"])
def test_a_point_that_is_none_is_refused(point: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        harness.main("breakeven", breakeven.run, breakeven._arguments, ["--point", point])
    assert "is no point: give MB/S:TOKENS" in capsys.readouterr().err
