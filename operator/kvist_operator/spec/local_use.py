"""What a manifest gives that one machine does not use. Pure; called by `kvist up`."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel

from kvist_operator.spec.cluster import CacheCluster

KUBERNETES_ONLY: Final = frozenset(
    {
        "metadata.namespace",
        "metadata.labels",
        "metadata.annotations",
        "spec.model.volume",
        "spec.engine.image",
        "spec.engine.drainDeadline",
        "spec.engine.resources",
        "spec.engine.shmSize",
        "spec.engine.podTemplate",
        "spec.engine.env.valueFrom",
        "spec.cache.disk.volumeClaimTemplate",
        "spec.cache.disk.retention",
        "spec.cache.remote.redis.managed",
        "spec.cache.remote.whenDeleted",
        "spec.router.replicas",
        "spec.router.autoscaling",
        "spec.router.limits.queueDeadline",
        "spec.router.image",
        "spec.router.resources",
        "spec.router.env.valueFrom",
        "spec.router.podTemplate",
        "spec.security",
        "spec.monitoring",
    }
)


def ignored_locally(cluster: CacheCluster) -> tuple[str, ...]:
    """Names, in YAML's spelling and order, of the settings that were given and are not used here."""
    return tuple(dict.fromkeys(_given(cluster, "")))


def _given(section: BaseModel, prefix: str) -> list[str]:
    found: list[str] = []
    for name, field in type(section).model_fields.items():
        if name not in section.model_fields_set:
            continue
        path = f"{prefix}{field.alias or name}"
        value = getattr(section, name)
        if path in KUBERNETES_ONLY:
            found.append(path)
            continue
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, BaseModel):
                found.extend(_given(item, f"{path}."))
    return found
