"""All objects of one cluster."""

from __future__ import annotations

from kvist_connector.errors import ConfigError
from kvist_operator.plan import Plan, kube_target
from kvist_operator.render.kube.accounts import access_objects
from kvist_operator.render.kube.alerts import alert_objects
from kvist_operator.render.kube.budgets import budget_objects
from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.dashboard import dashboard_objects
from kvist_operator.render.kube.engine import engine_objects
from kvist_operator.render.kube.meta import Object
from kvist_operator.render.kube.monitors import monitor_objects
from kvist_operator.render.kube.network import network_objects
from kvist_operator.render.kube.redis import redis_objects
from kvist_operator.render.kube.router import router_objects
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.kube_checks import kube_violation


def render(cluster: CacheCluster, plan: Plan, context: Context) -> tuple[Object, ...]:
    """Each after what it refers to; raises ConfigError for what cannot run or be merged."""
    target = kube_target(cluster)
    if (found := kube_violation(cluster, cpu=target.device == "cpu")) is not None:
        raise ConfigError(str(found))
    return (
        *access_objects(cluster, context),
        *redis_objects(cluster, context),
        *engine_objects(cluster, plan, context),
        *router_objects(cluster, plan, context),
        *budget_objects(cluster, context),
        *network_objects(cluster, context),
        *monitor_objects(cluster, context),
        *alert_objects(cluster, context),
        *dashboard_objects(cluster, context),
    )
