"""bench.overhead: which loads, what its figures say, and its own two ends against each other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import overhead
from bench import overhead_programs as programs

LABEL = "50 words, 0 % new, stream, 16 conn."


def piece(name: str, rate: float, p99: float, failed: int = 0) -> dict[str, Any]:
    point = {
        "requests": rate, "seconds": 1.0, "ttft_p50_s": p99 / 2, "ttft_p99_s": p99, "failed": failed,
        "problem": "", "processor_s": 0.5,
    }  # fmt: skip
    return {"name": name, "engines": 2, "problem": "", "points": {LABEL: point}}


def test_the_whole_grid_has_every_combination_and_the_short_one_is_part_of_it() -> None:
    whole = [*overhead.points("whole", 2), *overhead.points("whole", 64)]
    assert len(whole) == len({(point.label, point.engines) for point in whole}) == 48
    for engines in (2, 64):
        assert set(overhead.points("short", engines)) < set(overhead.points("whole", engines))


def test_ratios_are_of_medians_and_a_point_with_failures_is_none() -> None:
    found = overhead.Found([
        piece(overhead.OURS, 100, 0.02), piece(overhead.OURS, 300, 0.02),
        piece(overhead.CACHE_AWARE, 100, 0.04), piece(overhead.KV_AWARE, 900, 0.01, failed=1),
    ])  # fmt: skip
    assert found.ratio(overhead.CACHE_AWARE, "rate", 0) == [(f"{LABEL}, 2 engines", 2.0)]
    assert found.ratio(overhead.CACHE_AWARE, "rate", 10) == []
    assert found.ratio(overhead.KV_AWARE, "rate") == []


def test_goals_are_those_of_the_worst_point_and_of_the_memory_at_the_end() -> None:
    found = overhead.Found([piece(overhead.OURS, 90, 0.02), piece(overhead.CACHE_AWARE, 100, 0.04)])
    memory = [{"name": overhead.OURS, "bytes": [90, 100, 120], "requests": 10, "failed": 0}]
    rate, late, growth = overhead.goals(found, memory)
    assert (rate.value, rate.met) == (0.9, False)
    assert (late.value, late.met) == (0.5, True)
    assert (growth.value, growth.met) == (1.2, False)


@pytest.mark.skipif(shutil.which("go") is None, reason="no Go here")
@pytest.mark.parametrize("flags", [["--stream"], ["--fresh", "10"], ["--fresh", "100", "--stream"]])
def test_load_and_engines_understand_each_other(tmp_path_factory: Any, flags: list[str]) -> None:
    mock, cores = built(tmp_path_factory), programs.Cores.split()
    with programs.engines(mock, 3, cores) as ports:
        found = programs.load(
            mock, ports, cores, "--requests", 60, "--seconds", 0, "--connections", 6, *flags
        )
    assert (found["requests"], found["failed"]) == (60, 0)
    assert 0 < found["ttft_p50_s"] <= found["ttft_p99_s"]


def built(factory: Any) -> Path:
    folder: Path = factory.getbasetemp() / "mock-program"
    folder.mkdir(exist_ok=True)
    return folder / "mock" if (folder / "mock").exists() else programs.build(folder)


def test_without_go_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(programs.NotHereError, match="install Go"):
        programs.build(tmp_path)
