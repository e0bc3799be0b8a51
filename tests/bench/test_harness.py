"""The bench harness: goals, intervals, paired runs, exit status, published page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import harness, report
from bench.harness import Goal, Options, Result, Table

TABLE = Table("Times", ("what", "ms"), (("ours", "1"), ("theirs", "2")), "medians")


def bench(goal: Goal | None = None) -> harness.Result:
    return Result("ratio 0.5", (TABLE,), {"ratio": 0.5}, (goal,) if goal else (), ("peer: pip install peer",))


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal("g", 1.0, 1.0), True),
        (Goal("g", 1.1, 1.0), False),
        (Goal("g", 1.1, 1.0, at_least=True), True),
        (Goal("g", 0.9, 1.0, at_least=True), False),
    ],
)
def test_check_fails_exactly_when_a_goal_is_missed(goal: Goal, met: bool) -> None:
    assert goal.met is met
    assert harness.main("x", lambda _: bench(goal), argv=["--check"]) == (0 if met else 1)
    assert harness.main("x", lambda _: bench(goal), argv=[]) == 0


def test_a_goal_whose_interval_crosses_the_limit_says_so() -> None:
    assert "crosses" in str(Goal("g", 0.9, 1.0, interval=(0.8, 1.2)))
    assert "crosses" not in str(Goal("g", 0.9, 1.0, interval=(0.8, 0.95)))


def test_the_headline_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    harness.main("x", lambda _: bench(), argv=[])
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1] == "ratio 0.5"
    assert "not measured, since it is not here: peer: pip install peer" in lines


def test_json_holds_command_machine_figures_and_goals(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    harness.main("x", lambda _: bench(Goal("g", 1, 2)), argv=["--quick", "--json", str(target)])
    document = json.loads(target.read_text())
    assert document["command"] == "python -m bench.x --quick"
    assert document["figures"] == {"ratio": 0.5}
    assert document["goals"][0]["met"] is True
    assert {"date", "cores", "python", "kvist"} <= set(document["machine"])


def test_the_command_names_programs_and_files_without_their_folders(tmp_path: Path) -> None:
    target, found = tmp_path / "x.json", tmp_path / "found.json"
    target.touch()

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--peer", type=Path)
        parser.add_argument("--trace", type=Path)
        parser.add_argument("--pieces", type=Path)

    argv = ["--peer", str(target), f"--trace={target}", "--json", str(found), "--pieces", str(tmp_path)]
    harness.main("x", lambda _: bench(), add, argv)
    assert json.loads(found.read_text())["command"] == "python -m bench.x --peer x.json --trace=x.json"


def test_quick_takes_fewer_rounds() -> None:
    seen: list[int] = []

    def run(options: Options) -> Result:
        """Count."""
        seen.append(options.rounds(20))
        return bench()

    harness.main("x", run, argv=["--quick"])
    harness.main("x", run, argv=[])
    assert seen == [3, 20]


def test_paired_runs_alternate_their_order() -> None:
    order: list[str] = []
    ratio, ours, theirs = harness.paired_ratio(
        lambda: order.append("ours") or 1.0, lambda: order.append("theirs") or 2.0, rounds=4
    )
    assert order == ["ours", "theirs", "theirs", "ours"] * 2
    assert ratio.median == 0.5
    assert (ours, theirs) == ([1.0] * 4, [2.0] * 4)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30))
def test_an_interval_holds_its_median_and_lies_within_the_samples(samples: list[float]) -> None:
    found = harness.estimate(samples)
    assert min(samples) <= found.low <= found.median <= found.high <= max(samples)


def test_an_estimate_repeats() -> None:
    samples = [1.0, 2.0, 5.0, 3.0]
    assert harness.estimate(samples) == harness.estimate(samples)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        harness.estimate([])
    with pytest.raises(ValueError, match="no samples"):
        harness.percentile([], 0.5)


def test_the_page_shows_how_each_table_was_made() -> None:
    page = report.page([harness.document("x", bench(Goal("limit", 1, 2)), ["--json", "f"])])
    assert "`python -m bench.x`" in page
    assert "| ours | 1 |" in page
    assert "limit: 1" in page
    assert "not measured, since it is not here" in page


def test_a_bench_replaces_its_own_section_and_leaves_the_others() -> None:
    old = report.page([harness.document(name, bench(Goal("limit", 1, 2))) for name in ("copy", "ttft")])
    assert report.page([], old) == old
    new = report.page([harness.document("ttft", bench(Goal("limit", 3, 2)))], old)
    assert new.index("## ttft") < new.index("## copy")
    assert (new.count("limit: 1"), new.count("limit: 3")) == (1, 1)
    assert new.index("limit: 3") < new.index("## copy")


def test_remarks_stand_at_the_end_of_their_section_and_follow_their_file() -> None:
    documents = [harness.document(name, bench(Goal("limit", 1, 2))) for name in ("copy", "ttft")]
    first = report.page(documents, remarks={"ttft": "Why.", "absent": "Nothing."})
    assert first.index("limit: 1") < first.index("Why.") < first.index("## copy")
    assert "Nothing." not in first
    second = report.page([], first, remarks={"copy": "Because."})
    assert ("Why." in second, "Because." in second) == (False, True)
    assert report.page(documents, second, remarks={"ttft": "Why.", "absent": "Nothing."}) == first


def test_the_published_page_has_the_remarks_as_they_are_now() -> None:
    published = (Path(report.__file__).parent.parent / "docs/benchmarks.md").read_text()
    assert report.page([], published) == published, "run `python -m bench.report --page`"
    assert report.read_remarks().keys() <= set(report.BENCHES)


def test_every_published_bench_exists() -> None:
    root = Path(report.__file__).parent
    assert [name for name in report.BENCHES if not (root / f"{name}.py").is_file()] == []
