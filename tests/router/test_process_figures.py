"""Metrics of several processes as those of one, and how many processes there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvist_router.processes.cores import cores, default_relays
from kvist_router.processes.family import Family, added, bounded, families_of, lasting, text_of

counts = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=8)


def process(events: list[tuple[str, int]], running: int = 0) -> list[Family]:
    registry = CollectorRegistry()
    counter = Counter("requests", "All.", ["outcome"], registry=registry)
    histogram = Histogram("seconds", "Time.", buckets=(1, 5), registry=registry)
    Gauge("running", "Now.", registry=registry).set(running)
    for label, amount in events:
        counter.labels(label).inc(amount)
        histogram.observe(amount)
    return families_of(registry)


def values(families: list[Family]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, sample.labels): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(counts, min_size=1, max_size=4))
def test_sums_are_those_of_one_process_that_saw_everything(shares: list[list[tuple[str, int]]]) -> None:
    together = added(process(share, 1) for share in shares)
    one = process([event for share in shares for event in share], len(shares))
    assert values(together) == values(one)


@given(before=counts, after=counts)
def test_what_has_ended_still_counts_and_gauges_of_it_do_not(
    before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    found = values(added([process(after, 2), lasting(process(before, 5))]))
    assert found == values(process(before + after, 2))


def test_the_text_is_what_prometheus_reads() -> None:
    registry = CollectorRegistry()
    Counter("requests", 'All, "quoted"\n.', ["outcome"], registry=registry).labels('a"b\\').inc()
    families = families_of(registry)
    assert text_of(families) == generate_latest(registry)
    assert {family.name for family in text_string_to_metric_families(text_of(families).decode())} >= {
        "requests"
    }


def test_what_is_remembered_is_bounded() -> None:
    sample = process([("a", 1)])[0].samples[0]
    families = [Family(f"f{number}", "", "counter", [sample] * 50_000) for number in range(3)]
    assert bounded(families) == families[:1]


@pytest.mark.parametrize(
    ("limit", "found"), [("150000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", 8), ("?", 8)]
)
def test_cores_are_those_of_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, found: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    file = tmp_path / "cpu.max"
    file.write_text(limit)
    assert cores(file) == found
    assert cores(tmp_path / "none") == 8


def test_one_core_is_the_minds() -> None:
    assert [default_relays(count) for count in (1, 2, 3, 8, 64)] == [0, 0, 2, 7, 8]
