"""What Prometheus scrapes: PodMonitors, or ServiceMonitors where only that kind exists."""

from __future__ import annotations

from typing import Final

from kvist_connector.names import PATH_METRICS
from kvist_operator.plan.agent_tls import agent_tls_files
from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.meta import (
    ENGINE,
    LABEL_COMPONENT,
    LABEL_INSTANCE,
    ROUTER,
    Object,
    make,
    selector,
)
from kvist_operator.render.kube.secrets import control_token
from kvist_operator.render.kube.values import service_ports
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.base import format_duration

_GROUP: Final = "monitoring.coreos.com/v1"
_ADMIN: Final = "-admin"


def monitor_objects(cluster: CacheCluster, context: Context) -> list[Object]:
    """Empty where neither kind exists or the manifest does not want them."""
    if not cluster.spec.monitoring.pod_monitor:
        return []
    if "PodMonitor" in context.kinds:
        return [_monitor(cluster, context, part, "PodMonitor") for part in (ENGINE, ROUTER)]
    if "ServiceMonitor" in context.kinds:
        monitors = [_monitor(cluster, context, part, "ServiceMonitor") for part in (ENGINE, ROUTER)]
        return [_admin_service(cluster, context), *monitors]
    return []


def _monitor(cluster: CacheCluster, context: Context, part: str, kind: str) -> Object:
    endpoints = "podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"
    ports = ["router-admin"] if part == ROUTER else ["engine"]
    if part == ENGINE and cluster.spec.cache.enabled:
        ports.append("agent")
    return make(_GROUP, kind, cluster, context.namespace, part) | {
        "spec": {
            "selector": {"matchLabels": selector(cluster, part)},
            "podTargetLabels": [LABEL_INSTANCE, LABEL_COMPONENT],
            endpoints: [_endpoint(cluster, port) for port in ports],
        }
    }


def _endpoint(cluster: CacheCluster, port: str) -> Object:
    interval = format_duration(cluster.spec.monitoring.scrape_interval)
    found: Object = {"port": port, "path": PATH_METRICS, "interval": interval}
    if port == "agent" and agent_tls_files(cluster):
        # Pods are scraped by address, which their certificate does not have.
        found |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    if port == "agent":
        token = control_token(cluster)
        found["authorization"] = {"type": "Bearer", "credentials": {"name": token.name, "key": token.key}}
    return found


def _admin_service(cluster: CacheCluster, context: Context) -> Object:
    # Not a port of the router's own Service, so that clients cannot reach it there.
    return make("v1", "Service", cluster, context.namespace, ROUTER, _ADMIN) | {
        "spec": {
            "clusterIP": "None",
            "selector": selector(cluster, ROUTER),
            "ports": service_ports("router-admin"),
        }
    }
