"""Many CacheClusters on a real API server: time to converge, calls, memory, and silence afterwards.

Needs KUBECONFIG of a cluster in which it may do everything (`make e2e-up`, or `e2e/cluster api-only`).
Engines are scaled to zero and routers fit no node, so no pod runs; the namespace is removed in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench import harness
from kvist_connector import names
from kvist_connector.testing.ports import free_port
from kvist_operator.control.login import login
from kvist_operator.control.resources import CLUSTERS, STATEFUL_SETS, Resource
from kvist_operator.control.rest import RestApi

GOAL_SECONDS_PER_CLUSTER = 0.5
GOAL_MIB = 256.0
CONVERGE_SECONDS = 900.0
SETTLE_SECONDS = 30.0
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
READS = ("get", "list")


def run(options: harness.Options) -> harness.Result:
    """Apply N clusters, wait until each has children and status, then count writes while nothing happens."""
    if not os.environ.get("KUBECONFIG"):
        return harness.Result(
            "no figure", absent=("a Kubernetes API server: make e2e-up, then set KUBECONFIG",)
        )
    count = 20 if options.quick else options.extra.clusters
    return asyncio.run(_measure(count, 15.0 if options.quick else options.extra.idle))


async def _measure(count: int, idle: float) -> harness.Result:
    namespace = f"kvist-bench-{uuid.uuid4().hex[:6]}"
    async with RestApi(login) as api, aiohttp.ClientSession() as session, _namespace(api, namespace):
        for at in range(count):
            await api.create(CLUSTERS, _cluster(namespace, at))
        with (
            tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder,
            _operator(namespace, folder) as found,
        ):
            process, port = found
            seconds = await _converged(api, namespace, count, process)
            calls, times = await _calls(session, port), process.cpu_times()
            await asyncio.sleep(SETTLE_SECONDS)
            before = await _calls(session, port)
            await asyncio.sleep(idle)
            after = await _calls(session, port)
            memory = process.memory_info().rss / 2**20
    silent = after - before
    writes = sum(n for (verb, kind), n in silent.items() if verb not in READS and kind != "leases")
    reads = sum(n for (verb, _), n in silent.items() if verb in READS)
    return _result(count, seconds, calls, times.user + times.system, memory, idle, writes, reads)


def _result(
    count: int,
    seconds: float,
    calls: Counter[tuple[str, str]],
    processor: float,
    memory: float,
    idle: float,
    writes: int,
    reads: int,
) -> harness.Result:
    per = seconds / count
    rows = tuple((verb, kind, str(n), f"{n / count:.1f}") for (verb, kind), n in sorted(calls.items()))
    return harness.Result(
        headline=f"{count} CacheClusters converge in {seconds:.1f} s ({processor:.1f} s of processor) with "
        f"{memory:.0f} MiB; {writes} writes in {idle:.0f} idle s",
        tables=(harness.Table("Calls until converged", ("verb", "resource", "calls", "per cluster"), rows),),
        figures={
            "clusters": count,
            "seconds": seconds,
            "processor_seconds": processor,
            "calls": sum(calls.values()),
            "memory_mib": memory,
            "idle_seconds": idle,
            "idle_writes": writes,
            "idle_reads": reads,
        },
        goals=(
            harness.Goal("converge, per cluster", per, GOAL_SECONDS_PER_CLUSTER, unit=" s"),
            harness.Goal("memory of the operator", memory, GOAL_MIB, unit=" MiB"),
            harness.Goal("writes while idle, Lease apart", writes, 0),
        ),
    )


def _cluster(namespace: str, at: int) -> dict[str, object]:
    nowhere = {"spec": {"nodeSelector": {"kvist.dev/bench": "nowhere"}}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": f"bench-{at}", "namespace": namespace},
        "spec": {
            "model": {"name": "org/model"},
            "engine": {"replicas": 0},
            "router": {"podTemplate": nowhere},
        },
    }


@asynccontextmanager
async def _namespace(api: RestApi, name: str) -> AsyncIterator[None]:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    await api.raw("POST", NAMESPACES.path(None), body)
    try:
        yield
    finally:
        await api.raw("DELETE", NAMESPACES.path(None, name))


@contextmanager
def _operator(namespace: str, folder: str) -> Iterator[tuple[psutil.Process, int]]:
    port = free_port()
    flags = [f"--namespace={namespace}", f"--watch-namespaces=[{namespace}]", f"--port={port}"]
    log = Path(folder) / "operator.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvist_operator", "--host=127.0.0.1", "--log-level=warning", *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            yield psutil.Process(process.pid), port
        finally:
            ended = process.poll() is not None
            process.terminate()
            process.wait(30)
            if ended:
                sys.stderr.write(log.read_text()[-2000:])


async def _converged(api: RestApi, namespace: str, count: int, process: psutil.Process) -> float:
    """Seconds until every cluster has its engines' StatefulSet and a status of its generation."""
    began = time.monotonic()
    async with asyncio.timeout(CONVERGE_SECONDS):
        while process.status() != psutil.STATUS_ZOMBIE:
            clusters = await api.list(CLUSTERS, namespace)
            seen = sum(
                item.get("status", {}).get("observedGeneration") == item["metadata"]["generation"]
                for item in clusters
            )
            if seen == count and len(await api.list(STATEFUL_SETS, namespace)) == count:
                return time.monotonic() - began
            await asyncio.sleep(0.5)
    raise RuntimeError("the operator has ended; what it said is above")


async def _calls(session: aiohttp.ClientSession, port: int) -> Counter[tuple[str, str]]:
    async with session.get(f"http://127.0.0.1:{port}{names.PATH_METRICS}") as answer:
        text = await answer.text()
    found: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "kvist_operator_api_calls_total":
                found[sample.labels["verb"], sample.labels["resource"]] += int(sample.value)
    return found


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clusters", type=int, default=200, help="CacheClusters to apply (200)")
    parser.add_argument("--idle", type=float, default=600.0, help="seconds of silence to watch (600)")


if __name__ == "__main__":
    sys.exit(harness.main("operator", run, _arguments))
