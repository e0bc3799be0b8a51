"""A Grafana dashboard as a ConfigMap with the label that Grafana's sidecar looks for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from kvist_operator.render.kube.alerts import series
from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.meta import CLUSTER, Object, digest, make
from kvist_operator.spec import CacheCluster

_WIDTH: Final = 12
_HEIGHT: Final = 8


@dataclass(frozen=True)
class Panel:
    """A graph; `expression` with @ for the label selector of the cluster's series."""

    title: str
    unit: str
    expression: str
    legend: str


_TTFT: Final = "sum by (le, cache) (rate(kvist_router_ttft_seconds_bucket{@}[5m]))"
PANELS: Final = (
    Panel("Requests", "reqps", "sum by (outcome) (rate(kvist_router_requests_total{@}[5m]))", "{{outcome}}"),
    Panel("TTFT, median", "s", f"histogram_quantile(0.5, {_TTFT})", "{{cache}}"),
    Panel("TTFT, 99th percentile", "s", f"histogram_quantile(0.99, {_TTFT})", "{{cache}}"),
    Panel(
        "Tokens reused, share by tier",
        "percentunit",
        "sum by (tier) (rate(kvist_router_hit_tokens_total{@}[5m]))"
        " / scalar(sum(rate(kvist_router_recorded_prompt_tokens_total{@}[5m])))",
        "{{tier}}",
    ),
    Panel(
        "Requests that reused a chunk, share",
        "percentunit",
        "sum(rate(kvist_router_hit_requests_total{@}[5m]))"
        " / sum(rate(kvist_router_recorded_requests_total{@}[5m]))",
        "requests",
    ),
    Panel(
        "Prefill saved, seconds a second (estimated)",
        "none",
        "sum(rate(kvist_router_saved_seconds_total{@}[5m]))",
        "seconds",
    ),
    Panel(
        "Requests by replica",
        "reqps",
        "sum by (replica) (rate(kvist_router_decisions_total{@}[5m]))",
        "{{replica}}",
    ),
    Panel("Bytes by tier", "bytes", "sum by (tier) (kvist_agent_tier_bytes{@})", "{{tier}}"),
    Panel(
        "Not yet written",
        "bytes",
        "sum by (pod) (kvist_agent_write_behind_pending_bytes{@})",
        "{{pod}}",
    ),
    Panel(
        "Failures of lower tiers",
        "ops",
        'sum by (tier, operation) (rate(kvist_agent_tier_operation_seconds_count{@,outcome=~".+Error"}[5m]))',
        "{{tier}} {{operation}}",
    ),
)


def dashboard_objects(cluster: CacheCluster, context: Context) -> list[Object]:
    """Where something scrapes, a dashboard is of use."""
    if not cluster.spec.monitoring.dashboard or not context.kinds & {"PodMonitor", "ServiceMonitor"}:
        return []
    found = make("v1", "ConfigMap", cluster, context.namespace, CLUSTER, "-dashboard")
    found["metadata"]["labels"] = {**found["metadata"]["labels"], "grafana_dashboard": "1"}
    text = json.dumps(_dashboard(cluster, context), indent=1, sort_keys=True)
    return [found | {"data": {f"kvist-{context.namespace}-{cluster.name}.json": text}}]


def _dashboard(cluster: CacheCluster, context: Context) -> Object:
    place = series(cluster, context)
    return {
        "title": f"Kvist: {context.namespace}/{cluster.name}",
        "uid": f"kvist-{digest([context.namespace, cluster.name])}",
        "schemaVersion": 39,
        "tags": ["kvist"],
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}]
        },
        "panels": [_panel(i, panel, place) for i, panel in enumerate(PANELS)],
    }


def _panel(index: int, panel: Panel, place: str) -> Object:
    source = {"type": "prometheus", "uid": "${source}"}
    expression = panel.expression.replace("@", place)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": index % 2 * _WIDTH, "y": index // 2 * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": "A", "datasource": source, "expr": expression, "legendFormat": panel.legend},
        ],
    }
