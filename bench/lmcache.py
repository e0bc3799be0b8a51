"""LMCache's own server and its own benches, run from an environment of its own.

    python -m venv ENV && ENV/bin/pip install lmcache==0.5.6     (its pure dependencies and torch suffice)

Used by bench.arena and bench.tiers with `--lmcache ENV/bin/lmcache`. Telemetry is off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvist_connector.testing.ports import free_port

VERSION: Final = "0.5.6"
ABSENT: Final = (
    f"LMCache {VERSION}: pip install lmcache=={VERSION} into an environment of its own, then --lmcache "
    "ENVIRONMENT/bin/lmcache"
)
START_SECONDS: Final = 60.0
RUN_SECONDS: Final = 120.0
_END_SECONDS: Final = 20.0


def add_argument(parser: argparse.ArgumentParser) -> None:
    """`--lmcache`."""
    parser.add_argument(
        "--lmcache", type=Path, metavar="PROGRAM", help=f"of LMCache {VERSION}, to compare with"
    )


def server_bench(program: Path, folder: Path, tokens: int, shape: str, rounds: int) -> dict[str, float]:
    """Seconds, p50, of its `store` and `retrieve` of so many tokens between processes by shared memory."""
    with _server(program, folder) as (port, http_port):
        given = {
            "mode": "cpu",
            "transfer-mode": "lmcache_driven",
            "rpc-url": f"tcp://127.0.0.1:{port}",
            "url": f"http://127.0.0.1:{http_port}",
            "num-tokens": tokens,
            "kvcache-shape-spec": shape,
            "interval": 0,
            "end": rounds,
        }
        found = _bench(program, folder, "server", given)
    return {
        "store": found["cold_store"]["cold_store_p50"] / 1000,
        "load": found["warm_retrieve"]["warm_retrieve_p50"] / 1000,
    }


def tier_bench(program: Path, folder: Path, adapter: dict[str, Any], keys: int, kib: int) -> dict[str, float]:
    """MB/s of Store and Load of its `bench l2` over one adapter."""
    given = {
        "l2-adapter": json.dumps(adapter),
        "num-keys": keys,
        "data-size-kb": kib,
        "l1-align-bytes": 4096,
        "rounds": 3,
    }
    found = _bench(program, folder, "l2", given)
    operations = [value for name, value in found.items() if name.startswith("op_")]
    return {one["operation"]: one["throughput_avg_mbps"] for one in operations if one["total_success"]}


def _bench(program: Path, folder: Path, name: str, given: Mapping[str, object]) -> dict[str, Any]:
    output, log = folder / "lmcache.json", folder / "lmcache-bench.log"
    output.unlink(missing_ok=True)
    command = [str(program), "bench", name, *_flags({**given, "format": "json", "output": output})]
    with log.open("wb") as file:
        ended = subprocess.run(
            command, stdout=file, stderr=file, env=_environment(), timeout=RUN_SECONDS, check=False
        )
    if ended.returncode or not output.exists():
        raise RuntimeError(f"lmcache bench {name} failed:\n{log.read_text()[-2000:]}")
    found: dict[str, Any] = json.loads(output.read_text())["metrics"]
    return found


@contextmanager
def _server(program: Path, folder: Path) -> Iterator[tuple[int, int]]:
    port, http_port = free_port(), free_port()
    given = {
        "host": "127.0.0.1",
        "port": port,
        "http-host": "127.0.0.1",
        "http-port": http_port,
        "l1-size-gb": 3,
        "eviction-policy": "LRU",
        "supported-transfer-mode": "lmcache_driven",
        "shm-name": f"kvist-bench-{os.getpid()}",
    }
    log = folder / "lmcache-server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(program), "server", "--disable-observability", *_flags(given)],
            stdout=file,
            stderr=file,
            env=_environment(),
        )
    try:
        limit = time.monotonic() + START_SECONDS
        while b"startup complete" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"lmcache server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield port, http_port
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_SECONDS)


def _flags(given: Mapping[str, object]) -> list[str]:
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def _environment() -> dict[str, str]:
    return os.environ | {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "DO_NOT_TRACK": "1",
    }
