"""What a manifest gives that one machine does not use, or refuses. Pure; called by `kvist up`."""

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
        "spec.router.weights",
        "spec.router.image",
        "spec.router.resources",
        "spec.router.env.valueFrom",
        "spec.router.podTemplate",
        "spec.security",
        "spec.monitoring",
    }
)


_OPEN: Final = (
    "kvist up does not enforce it, and the endpoint would be open: leave it out, deploy to Kubernetes, or "
    "run kvist router with {setting} in front of the engines"
)


def refused_locally(cluster: CacheCluster) -> tuple[str, ...]:
    """Field, value and remedy of what protects the endpoint and would not hold here; empty: nothing."""
    router = cluster.spec.router
    keys, tls = router.auth.api_keys, router.tls
    tenants = ", ".join(tenant.name for tenant in router.tenants)
    asked = (
        ("auth.apiKeys", f"{keys.name}/{keys.key}" if keys else "", "auth.keys_file"),
        ("tenants", tenants, "tenants"),
        ("tls", f"{tls.certificate.name}/{tls.certificate.key}" if tls else "", "tls.certificate_file"),
    )
    return tuple(
        f"spec.router.{field}: '{value}': {_OPEN.format(setting=setting)}"
        for field, value, setting in asked
        if value
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
