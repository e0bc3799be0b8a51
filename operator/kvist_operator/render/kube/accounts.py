"""Service accounts, and the one right that routers need: to watch the engines' EndpointSlices."""

from __future__ import annotations

from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.meta import ENGINE, ROUTER, Object, make, name_of
from kvist_operator.spec import CacheCluster


def account(cluster: CacheCluster, component: str) -> str:
    """Name of the component's service account."""
    return cluster.spec.security.service_account_name or name_of(cluster, component)


def access_objects(cluster: CacheCluster, context: Context) -> list[Object]:
    """Accounts unless the user named one, Role and RoleBinding of the routers."""
    namespace = context.namespace
    own = cluster.spec.security.service_account_name is None
    accounts = [
        make("v1", "ServiceAccount", cluster, namespace, component) | {"automountServiceAccountToken": False}
        for component in ((ENGINE, ROUTER) if own else ())
    ]
    rules = [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    role = make("rbac.authorization.k8s.io/v1", "Role", cluster, namespace, ROUTER) | {"rules": rules}
    binding = make("rbac.authorization.k8s.io/v1", "RoleBinding", cluster, namespace, ROUTER) | {
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": name_of(cluster, ROUTER),
        },
        "subjects": [
            {"kind": "ServiceAccount", "name": account(cluster, ROUTER), "namespace": namespace},
        ],
    }
    return [*accounts, role, binding]
