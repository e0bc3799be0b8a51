"""What two agents and the router cost while nothing happens, beside two real engines."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench import harness
from bench.prompts import model_folder
from kvist_cli.local import Cluster, Options, Ports
from kvist_connector import names
from kvist_connector.testing.ports import free_ports
from kvist_operator import spec

GOAL_PERCENT = 3.0
SETTLE_SECONDS = 10
WINDOW_SECONDS = 60
QUICK_WINDOW_SECONDS = 10
REPLICAS = 2


def run(options: harness.Options) -> harness.Result:
    """Processor time of agents and router over a minute without requests; engines are listed apart."""
    window = QUICK_WINDOW_SECONDS if options.quick else WINDOW_SECONDS
    with (
        tempfile.TemporaryDirectory(prefix="kvist-idle-") as folder,
        Cluster.up(_manifest(), Options(run_dir=Path(folder), ports=_ports())) as cluster,
    ):
        time.sleep(SETTLE_SECONDS)
        before = _used(cluster)
        began = time.monotonic()
        time.sleep(window)
        seconds = time.monotonic() - began
        after = _used(cluster)
    percent = {name: 100 * (after[name] - before[name]) / seconds for name in before}
    ours = sum(value for name, value in percent.items() if not name.startswith("engine"))
    rows = tuple((name, f"{value:.2f}") for name, value in sorted(percent.items()))
    return harness.Result(
        headline=f"two agents and the router idle at {ours:.2f} % of one core together",
        tables=(
            harness.Table(f"Processor time over {seconds:.0f} idle s", ("program", "% of one core"), rows),
        ),
        figures={"percent": ours, "programs": percent},
        goals=(harness.Goal("agents and router, idle", ours, GOAL_PERCENT, unit=" %"),),
    )


def _manifest() -> spec.CacheCluster:
    return spec.parse(
        {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": f"bench-idle-{os.getpid()}"},
            "spec": {
                "model": {"name": str(model_folder()), "servedName": "idle"},
                "engine": {"replicas": REPLICAS, "maxModelLen": 2048, "kvCacheMemory": "128Mi"},
                "cache": {"memory": "256Mi", "disk": {"size": "256Mi"}},
            },
        }
    )


def _ports() -> Ports:
    router, admin, engine, agent = free_ports(4, run=REPLICAS)
    return Ports(router=router, router_admin=admin, engine=engine, agent=agent)


def _used(cluster: Cluster) -> dict[str, float]:
    """Seconds of processor time of each program with its children."""
    found = {}
    for program in cluster.programs():
        process = psutil.Process(cluster.pid(program.name))
        family = [process, *process.children(recursive=True)]
        found[program.name] = sum(sum(member.cpu_times()[:2]) for member in family)
    return found


if __name__ == "__main__":
    sys.exit(harness.main("idle", run))
