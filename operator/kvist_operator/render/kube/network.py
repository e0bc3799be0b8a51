"""NetworkPolicies from one table of who connects to what. Probes of the kubelet pass without a rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.plan.peers import PORT as PEER_PORT
from kvist_operator.plan.peers import has_peers
from kvist_operator.plan.plan import NEIGHBOURS
from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.meta import ENGINE, LABEL_NAME, MANAGER, REDIS, ROUTER, Object, make, selector
from kvist_operator.render.kube.redis import managed_redis
from kvist_operator.render.kube.values import PORTS
from kvist_operator.spec import CacheCluster

_CLIENTS: Final = "clients"
_METRICS: Final = "metrics"
_OPERATOR: Final = "operator"
_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Edge:
    """Pods of `to` accept connections to `port` from `sources`: components, or one of the names above."""

    to: str
    port: str
    sources: tuple[str, ...]


EDGES: Final = (
    Edge(ENGINE, "engine", (ROUTER, _METRICS)),
    Edge(ENGINE, "agent", (ROUTER, ENGINE, _OPERATOR, _METRICS)),
    Edge(ENGINE, PEER_PORT, (ENGINE,)),
    Edge(ROUTER, "router", (_CLIENTS,)),
    Edge(ROUTER, "router-admin", (_OPERATOR, _METRICS)),
    Edge(ROUTER, NEIGHBOURS, (ROUTER,)),
    Edge(REDIS, "redis", (ENGINE,)),
)


def network_objects(cluster: CacheCluster, context: Context) -> list[Object]:
    """One policy a component, unless switched off."""
    if not cluster.spec.security.network_policy.enabled:
        return []
    parts = [ENGINE, ROUTER, *([REDIS] if managed_redis(cluster) else [])]
    return [_policy(cluster, context, part) for part in parts]


def _policy(cluster: CacheCluster, context: Context, part: str) -> Object:
    wished = cluster.spec.security.network_policy
    body: dict[str, Any] = {
        "podSelector": {"matchLabels": selector(cluster, part)},
        "policyTypes": ["Ingress", *(["Egress"] if wished.egress else [])],
        "ingress": [_ingress(cluster, context, edge) for edge in _edges(cluster) if edge.to == part],
    }
    if wished.egress:
        body["egress"] = _egress(cluster, part)
    return make("networking.k8s.io/v1", "NetworkPolicy", cluster, context.namespace, part) | {"spec": body}


def _edges(cluster: CacheCluster) -> list[Edge]:
    cached = cluster.spec.cache.enabled
    wanted = [edge for edge in EDGES if cached or edge.port not in ("agent", "redis", NEIGHBOURS)]
    return [edge for edge in wanted if edge.port != PEER_PORT or has_peers(cluster)]


def _ingress(cluster: CacheCluster, context: Context, edge: Edge) -> Object:
    peers = [peer for source in edge.sources for peer in _peers(cluster, context, source)]
    rule: Object = {"ports": [_port(PORTS[edge.port])]}
    # No `from` at all admits everyone.
    return rule | ({"from": peers} if peers else {})


def _peers(cluster: CacheCluster, context: Context, source: str) -> list[Object]:
    wished = cluster.spec.security.network_policy
    if source == _CLIENTS:
        return list(wished.clients)
    if source == _METRICS:
        prometheus = {LABEL_NAME: "prometheus"}
        anywhere = {"namespaceSelector": {}, "podSelector": {"matchLabels": prometheus}}
        return list(wished.metrics_from) or [anywhere]
    if source == _OPERATOR:
        name = context.operator_namespace
        namespaces = {"matchLabels": {_NAMESPACE_NAME: name}} if name else {}
        pods = {"matchLabels": {LABEL_NAME: MANAGER}}
        return [{"namespaceSelector": namespaces, "podSelector": pods}]
    return [_pods(cluster, source)]


def _egress(cluster: CacheCluster, part: str) -> list[Object]:
    rules = [
        {"to": [_pods(cluster, edge.to)], "ports": [_port(PORTS[edge.port])]}
        for edge in _edges(cluster)
        if part in edge.sources and (edge.to != REDIS or managed_redis(cluster))
    ]
    if part in (ENGINE, ROUTER):
        rules.append({"ports": [_port(53, "UDP"), _port(53)]})
    if part == ROUTER:
        # The API server, whose address a policy cannot name.
        rules.append({"ports": [_port(443), _port(6443)]})
    further = cluster.spec.security.network_policy.egress_to
    if part in (ENGINE, ROUTER) and further:
        rules.append({"to": list(further)})
    return rules


def _pods(cluster: CacheCluster, part: str) -> Object:
    return {"podSelector": {"matchLabels": selector(cluster, part)}}


def _port(number: int, protocol: str = "TCP") -> Object:
    return {"protocol": protocol, "port": number}
