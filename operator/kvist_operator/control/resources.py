"""Kinds of the Kubernetes API that the operator reads or writes, and the paths of their objects. Pure.

Called by everything that talks to the API server. `MANAGED` are the kinds that a CacheCluster may own;
PersistentVolumeClaims are none of them, so nothing here can delete one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_connector.names import API_VERSION, KIND
from kvist_operator.render.kube.meta import LABEL_INSTANCE, LABEL_MANAGED_BY, MANAGER

Object = dict[str, Any]

MANAGED_SELECTOR: Final = {LABEL_MANAGED_BY: MANAGER}


@dataclass(frozen=True, order=True)
class Resource:
    """One kind; `group` is empty for the core API."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """As objects spell it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """Path of the group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Path of a collection, an object or a subresource; namespace None: over all namespaces."""
        place = f"/namespaces/{namespace}" if namespace is not None else ""
        parts = [f"{self.root}{place}/{self.plural}", name, subresource]
        return "/".join(part for part in parts if part)


_GROUP, _VERSION = API_VERSION.split("/")
CLUSTERS: Final = Resource(_GROUP, _VERSION, "cacheclusters", KIND)
PODS: Final = Resource("", "v1", "pods", "Pod")
SECRETS: Final = Resource("", "v1", "secrets", "Secret")
EVENTS: Final = Resource("", "v1", "events", "Event")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")
STATEFUL_SETS: Final = Resource("apps", "v1", "statefulsets", "StatefulSet")
DEPLOYMENTS: Final = Resource("apps", "v1", "deployments", "Deployment")
AUTOSCALERS: Final = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")

# In the order in which they are applied: what others refer to comes first, programs come last.
_ALWAYS: Final = (
    Resource("", "v1", "serviceaccounts", "ServiceAccount"),
    Resource("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("", "v1", "services", "Service"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    STATEFUL_SETS,
    DEPLOYMENTS,
    AUTOSCALERS,
)
_OPTIONAL: Final = (
    Resource("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor"),
    Resource("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor"),
    Resource("monitoring.coreos.com", "v1", "prometheusrules", "PrometheusRule"),
)
OPTIONAL_KINDS: Final = frozenset(resource.kind for resource in _OPTIONAL)
OPTIONAL_GROUP: Final = _OPTIONAL[0]
BY_KIND: Final[Mapping[tuple[str, str], Resource]] = {
    (resource.api_version, resource.kind): resource for resource in (*_ALWAYS, *_OPTIONAL)
}


def managed(optional: frozenset[str]) -> tuple[Resource, ...]:
    """Kinds that a CacheCluster may own here; `optional` are the kinds found on this server."""
    return (*_ALWAYS, *(resource for resource in _OPTIONAL if resource.kind in optional))


def resource_of(obj: Mapping[str, Any]) -> Resource:
    """The kind of a rendered object; raises ValueError for one the operator has no rights for."""
    key = (str(obj.get("apiVersion")), str(obj.get("kind")))
    found = BY_KIND.get(key)
    if found is None:
        raise ValueError(f"{key[0]} {key[1]}: not a kind that the operator manages; add it to MANAGED")
    return found


def cluster_labels(name: str) -> dict[str, str]:
    """What selects the children of one cluster in its namespace."""
    return {LABEL_INSTANCE: name, LABEL_MANAGED_BY: MANAGER}


def owner_reference(cluster: Mapping[str, Any]) -> Object:
    """What makes Kubernetes delete a child after its cluster; it never holds the cluster's deletion up."""
    meta = cluster["metadata"]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }
