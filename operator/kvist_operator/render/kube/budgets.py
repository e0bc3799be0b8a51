"""PodDisruptionBudgets: one pod of each part at a time, and a broken one is never protected."""

from __future__ import annotations

from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.meta import ENGINE, REDIS, ROUTER, Object, make, selector
from kvist_operator.render.kube.redis import managed_redis
from kvist_operator.spec import CacheCluster


def budget_objects(cluster: CacheCluster, context: Context) -> list[Object]:
    """Of engines, routers and a managed Redis."""
    parts = [ENGINE, ROUTER, *([REDIS] if managed_redis(cluster) else [])]
    return [
        make("policy/v1", "PodDisruptionBudget", cluster, context.namespace, part)
        | {
            "spec": {
                "maxUnavailable": 1,
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": selector(cluster, part)},
            }
        }
        for part in parts
    ]
