"""What routers say of the engines, parsed. Pure; `ask.py` fetches it from every router's admin port."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from kvist_operator.control.errors import NoAnswer

_COUNTERS: Final = {
    "kvist_router_recorded_requests_total": "requests",
    "kvist_router_hit_requests_total": "hit_requests",
    "kvist_router_recorded_prompt_tokens_total": "tokens",
    "kvist_router_hit_tokens_total": "hit_tokens",
    "kvist_router_saved_seconds_total": "saved_seconds",
}


@dataclass(frozen=True)
class ReplicaView:
    """One engine as one router sees it."""

    healthy: bool = False
    mirrored: bool = False
    draining: bool = False
    listed: bool = True  # its endpoint is ready and not ending: only then is it chosen
    models: tuple[str, ...] = ()
    problem: str = ""
    doubted: bool = False  # its engine does not find what its view claims


@dataclass(frozen=True)
class Figures:
    """Counters of what was reused, since the routers started."""

    requests: float = 0.0
    hit_requests: float = 0.0
    tokens: float = 0.0
    hit_tokens: float = 0.0
    saved_seconds: float = 0.0

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.requests + other.requests,
            self.hit_requests + other.hit_requests,
            self.tokens + other.tokens,
            self.hit_tokens + other.hit_tokens,
            self.saved_seconds + other.saved_seconds,
        )


@dataclass(frozen=True)
class RouterView:
    """One router's answer; `silent` says why there is none."""

    silent: str = ""
    replicas: Mapping[str, ReplicaView] = field(default_factory=dict)
    tokens_problem: str = ""
    figures: Figures = Figures()

    def mirrors(self, engine: str) -> bool:
        """Whether it knows what this engine holds."""
        found = self.replicas.get(engine)
        return found is not None and found.healthy and found.mirrored

    def routes(self, model: str) -> bool:
        """Whether a request for the model would go to an engine that answers."""
        found = self.replicas.values()
        chosen = (item for item in found if item.healthy and item.listed and not item.draining)
        return any(model in item.models for item in chosen)


def router_view(replicas: Any, metrics: str) -> RouterView:
    """From `/v1/kvist/replicas` and `/metrics`; raises NoAnswer when they are not what a router says."""
    try:
        listed = {item["name"]: _replica(item) for item in replicas["replicas"]}
        problem = (replicas.get("local_tokens") or {}).get("problem") or ""
    except (KeyError, TypeError, AttributeError) as error:
        raise NoAnswer("its answer is not that of a router") from error
    return RouterView("", listed, str(problem), figures(metrics))


def figures(metrics: str) -> Figures:
    """From Prometheus' text form; what is not there is 0."""
    sums = dict.fromkeys(_COUNTERS.values(), 0.0)
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name in _COUNTERS:
                    sums[_COUNTERS[sample.name]] += sample.value
    except ValueError as error:
        raise NoAnswer("its metrics are not in Prometheus' text form") from error
    return Figures(**sums)


def total(views: Iterable[RouterView]) -> Figures:
    """Of all routers together."""
    return sum((view.figures for view in views), Figures())


def _replica(item: Mapping[str, Any]) -> ReplicaView:
    return ReplicaView(
        healthy=bool(item["healthy"]),
        mirrored=bool(item["mirrored"]),
        draining=bool(item["draining"]),
        listed=bool(item.get("listed_ready", True)) and not item.get("terminating"),
        models=tuple(item.get("models") or ()),
        problem=str(item.get("problem") or item.get("feed", {}).get("problem") or ""),
        doubted=bool((item.get("trust") or {}).get("doubted")),
    )
