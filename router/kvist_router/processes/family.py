"""Metrics of several processes as those of one. Pure; called by keeper.py and child.py.

Counters and histograms are sums, over processes that have ended too, so that they never go down; what a
process counted since it was last asked ends with it. Gauges are sums over processes that live: in-flight
requests of all relays, and for those of the mind the one there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

MAX_SAMPLES = 65_536  # of ended processes that are remembered
CREATED = "_created"

Labels = tuple[tuple[str, str], ...]


class Sample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One value; `name` is the family's with a suffix."""

    name: str
    labels: Labels
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """What has one name."""

    name: str
    text: str
    kind: str
    samples: list[Sample]


def families_of(registry: CollectorRegistry) -> list[Family]:
    """All of a process."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [Sample(item.name, tuple(item.labels.items()), item.value) for item in metric.samples],
        )
        for metric in registry.collect()
    ]


def lasting(families: Iterable[Family]) -> list[Family]:
    """What a process leaves behind when it ends."""
    return [family for family in families if family.kind in ("counter", "histogram")]


def added(processes: Iterable[Iterable[Family]]) -> list[Family]:
    """The sums, in the order in which families and samples come first."""
    found: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, Labels], float]] = {}
    for families in processes:
        for family in families:
            found.setdefault(family.name, family)
            sums = values.setdefault(family.name, {})
            for sample in family.samples:
                _add(sums, sample)
    return [
        Family(name, family.text, family.kind, [Sample(*key, value) for key, value in values[name].items()])
        for name, family in found.items()
    ]


def bounded(families: list[Family]) -> list[Family]:
    """No more samples than are remembered: those of the families that come first."""
    kept, left = [], MAX_SAMPLES
    for family in families:
        left -= len(family.samples)
        if left >= 0:
            kept.append(family)
    return kept


def text_of(families: Iterable[Family]) -> bytes:
    """In Prometheus' text form."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    return generate_latest(registry)


class _Given(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """As the library wants them."""
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric


def _add(sums: dict[tuple[str, Labels], float], sample: Sample) -> None:
    key = sample.name, sample.labels
    old = sums.get(key)
    if old is None:
        sums[key] = sample.value
    elif sample.name.endswith(CREATED):
        sums[key] = min(old, sample.value)
    else:
        sums[key] = old + sample.value
