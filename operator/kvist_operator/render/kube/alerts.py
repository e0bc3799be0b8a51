"""Alert rules. Every alert has a section of its name in docs/runbooks.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.meta import CLUSTER, Object, make
from kvist_operator.spec import CacheCluster

RUNBOOKS: Final = "runbooks.md"


@dataclass(frozen=True)
class Alert:
    """`expression` with @ for the label selector of one cluster's series."""

    name: str
    expression: str
    minutes: int
    severity: str
    summary: str


ALERTS: Final = (
    Alert(
        "KvistNoHealthyReplica",
        "max(kvist_router_replica_healthy{@}) == 0",
        2,
        "critical",
        "No replica takes requests.",
    ),
    Alert(
        "KvistReplicaUnhealthy",
        "min by (replica) (max by (replica) (kvist_router_replica_healthy{@})) == 0",
        10,
        "warning",
        "A replica takes no requests.",
    ),
    Alert(
        "KvistFeedDown",
        "max by (replica) (kvist_router_feed_live{@}) == 0",
        5,
        "warning",
        "Routers do not hear what a replica holds, so they send requests there by guess.",
    ),
    Alert(
        "KvistRequestsRefused",
        "sum(rate(kvist_router_refusals_total{@}[5m]))"
        " > 0.05 * sum(rate(kvist_router_requests_total{@}[5m]))",
        10,
        "warning",
        "Routers refuse more than 5 % of the requests.",
    ),
    Alert(
        "KvistTokensDiffer",
        "increase(kvist_router_token_mismatches_total{@}[15m]) > 0",
        0,
        "warning",
        "Routers derive other tokens than the engines and ask them instead, which is slower.",
    ),
    Alert(
        "KvistRouterProcessEnded",
        "sum(increase(kvist_router_process_restarts_total{@}[15m])) > 0",
        0,
        "warning",
        "A process of a router ended or hung; meanwhile requests may have gone by hash, or streams ended.",
    ),
    Alert(
        "KvistTierFailing",
        'sum by (tier) (rate(kvist_agent_tier_operation_seconds_count{@,outcome=~".+Error"}[5m])) > 0.1',
        10,
        "warning",
        "A tier below memory fails; engines go on without it.",
    ),
    Alert(
        "KvistTierLost",
        "max by (tier) (kvist_agent_tier_answers{@}) == 0",
        5,
        "warning",
        "A tier below memory answers no agent; engines go on without it.",
    ),
    Alert(
        "KvistWriteBehindLate",
        "max by (pod) (kvist_agent_write_behind_pending_bytes{@}) > 4 * 1024 ^ 3",
        15,
        "warning",
        "Chunks come faster than the lower tiers take them.",
    ),
)


def alert_objects(cluster: CacheCluster, context: Context) -> list[Object]:
    """One PrometheusRule where that kind exists."""
    if not cluster.spec.monitoring.prometheus_rule or "PrometheusRule" not in context.kinds:
        return []
    rules = [_rule(alert, cluster, context) for alert in ALERTS]
    return [
        make("monitoring.coreos.com/v1", "PrometheusRule", cluster, context.namespace, CLUSTER)
        | {"spec": {"groups": [{"name": f"kvist-{context.namespace}-{cluster.name}", "rules": rules}]}}
    ]


def series(cluster: CacheCluster, context: Context) -> str:
    """Label selector of a cluster's series, as the monitors label them."""
    return f'namespace="{context.namespace}",app_kubernetes_io_instance="{cluster.name}"'


def _rule(alert: Alert, cluster: CacheCluster, context: Context) -> Object:
    base = context.docs_url.rstrip("/") or "docs"
    return {
        "alert": alert.name,
        "expr": alert.expression.replace("@", series(cluster, context)),
        "for": f"{alert.minutes}m",
        "labels": {
            "severity": alert.severity,
            "namespace": context.namespace,
            "cachecluster": cluster.name,
        },
        "annotations": {
            "summary": alert.summary,
            "description": f"CacheCluster {context.namespace}/{cluster.name}: {alert.summary}",
            "runbook_url": f"{base}/{RUNBOOKS}#{alert.name.lower()}",
        },
    }
