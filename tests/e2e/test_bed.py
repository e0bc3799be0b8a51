"""What the bed remembers and what it refuses, without starting anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed.bed import Bed, BedError
from testbed.cluster import refuse_unusable
from testbed.host_folders import HostFolder, claims, engine_overlay
from testbed.namespaces import Process, alive, describe
from testbed.record import Record, load, save
from testbed.remains import remove_folders
from testbed.waiting import until


def test_a_record_reads_back_what_was_saved(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    record = Record(Process(12, 34)).having("etcd", Process(5, 6))
    save(bed, record)
    assert load(bed) == record


@pytest.mark.parametrize("text", ["", "{", "[]", '{"first": {}}', '{"first": {"pid": 1}, "programs": {}}'])
def test_a_damaged_record_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    assert load(Bed(tmp_path)) is None


def test_a_process_is_its_pid_and_start_time() -> None:
    ours = describe(os.getpid())
    assert alive(ours)
    assert not alive(Process(ours.pid, ours.started + 1))


def test_waiting_ends_at_its_deadline_and_says_why() -> None:
    with pytest.raises(BedError, match=r"the thing: not within 0 s\. It is ill"):
        until("the thing", lambda: False, 0, lambda: "It is ill")


def test_state_where_the_bed_mounts_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(BedError, match="KVIST_E2E_STATE"):
        refuse_unusable(Bed(Path("/run/kvist")))


def test_without_root_the_bed_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BedError, match="root"):
        refuse_unusable(Bed(tmp_path))


def test_removing_takes_the_state_and_only_it(tmp_path: Path) -> None:
    bed = Bed(tmp_path / "state")
    (bed.log / "deep").mkdir(parents=True)
    (tmp_path / "neighbour").touch()
    remove_folders(bed)
    remove_folders(bed)
    assert [path.name for path in tmp_path.iterdir()] == ["neighbour"]


def test_a_folder_of_the_machine_is_claimed_by_one_namespace_only(tmp_path: Path) -> None:
    volume, claim = claims("ours", [HostFolder("checkout", tmp_path)])
    assert volume["spec"]["hostPath"]["path"] == str(tmp_path)
    assert volume["spec"]["claimRef"] == {"namespace": "ours", "name": claim["metadata"]["name"]}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    overlay = engine_overlay([HostFolder("checkout", tmp_path)])["spec"]
    [mount] = overlay["containers"][0]["volumeMounts"]
    assert mount == {"name": "checkout", "mountPath": str(tmp_path), "readOnly": True}
    assert "hostPath" not in str(overlay)
