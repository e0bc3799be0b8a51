"""The bed removes exactly what it made, also after a crash. A second, small bed of its own: etcd only."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.bed import Bed
from testbed.cluster import begin, down
from testbed.control_plane import start_etcd
from testbed.namespaces import alive, inside
from testbed.programs import catalogue
from testbed.record import load
from testbed.remains import CGROUPS
from testbed.running import Runner
from testbed.waiting import until

pytestmark = pytest.mark.e2e_api


def another(state: Path, number: int) -> Bed:
    """A bed that shares no name or address with the usual one."""
    return Bed(
        state,
        link=f"kvist-e2e-{number}",
        machine=f"172.30.{number}.2",
        address=f"172.30.{number}.1",
        services=f"10.{number}.0.0/16",
        api_service=f"10.{number}.0.1",
        pods=f"10.24{number}.0.0/24",
    )


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Runner]:
    """Namespaces with a link and an etcd, beside the bed that the other tests use."""
    bed = another(tmp_path / "bed", 8)
    down(bed)
    runner = Runner(bed, catalogue(), begin(bed))
    start_etcd(runner)
    yield runner
    down(bed)


def test_down_leaves_no_process_link_mount_cgroup_or_file(small: Runner) -> None:
    bed, first = small.bed, small.record.first
    group = controller() / "k8s.io" / "kvist-e2e-self"
    group.mkdir(parents=True)
    (bed.containers / group.name).mkdir(parents=True)
    (bed.state / "mounted").mkdir()
    small.run("mount", "-t", "tmpfs", "tmpfs", f"{bed.state}/mounted")
    small.run("sh", "-c", f"sleep 1000 >/dev/null 2>&1 & echo $! >{bed.state}/sleeper")
    sleeper = host_pid(small, int((bed.state / "sleeper").read_text()))
    (group / "cgroup.procs").write_text(str(sleeper))
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        down(bed)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert not alive(first)
    assert not Path(f"/proc/{sleeper}").exists()
    assert not Path(f"/sys/class/net/{bed.link}").exists()
    assert not group.exists()
    assert not bed.state.exists()


def test_a_program_that_ended_is_noticed(small: Runner) -> None:
    etcd = small.record.programs["etcd"]
    assert small.record.dead() == []
    small.run("kill", "-9", str(etcd.pid))
    until("the end of etcd", lambda: load(small.bed).dead() == ["etcd"], 10)
    until("its reaping", lambda: not (inside(small.record.first) / str(etcd.pid)).exists(), 10)


def test_down_finds_a_bed_whose_record_was_lost(small: Runner) -> None:
    (small.bed.state / "state.json").unlink()
    down(small.bed)
    assert not alive(small.record.first)
    assert not small.bed.state.exists()


def test_down_leaves_other_beds_as_they_are(small: Runner, tmp_path: Path) -> None:
    mounted = small.run("cat", "/proc/self/mountinfo")
    second = another(tmp_path / "second", 9)
    begin(second)
    down(second)
    assert small.run("cat", "/proc/self/mountinfo") == mounted
    assert small.record.dead() == []


def test_everything_ends_with_the_first_process(small: Runner) -> None:
    etcd = host_pid(small, small.record.programs["etcd"].pid)
    os.kill(small.record.first.pid, signal.SIGKILL)
    down(small.bed)
    assert not Path(f"/proc/{etcd}").exists()


def controller() -> Path:
    """A place where cgroups can be made, of version 1 or 2."""
    found = (path.parent for path in CGROUPS.glob("*/cgroup.procs"))
    return next(found, CGROUPS)


def host_pid(runner: Runner, pid: int) -> int:
    """The number on the machine of a process inside."""
    wanted = (inside(runner.record.first) / str(pid) / "ns" / "pid").stat().st_ino
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            numbers = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:"))
            same = (status.parent / "ns" / "pid").stat().st_ino == wanted
        except (OSError, StopIteration):
            continue  # it ended while we looked
        if same and numbers.split()[-1] == str(pid):
            return int(status.parent.name)
    raise LookupError(f"no process {pid} in the bed")
