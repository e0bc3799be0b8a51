"""What the plan's tokens stand for inside a pod."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from kvist_connector import names
from kvist_operator.plan.agent_tls import agent_tls_files, agent_tls_token
from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.meta import ENGINE, REDIS, ROUTER, name_of
from kvist_operator.render.kube.pods import MODELS, RUN, TOKEN_FILE
from kvist_operator.render.local import EVENTS_SUFFIX, REPLAY_SUFFIX
from kvist_operator.spec import CacheCluster

# The one port table: containers, Services, network policies and monitors take theirs from here.
PORTS: Final = {
    "engine": names.PORT_ENGINE,
    "agent": names.PORT_AGENT,
    "peer": names.PORT_PEER,
    "router": names.PORT_ROUTER,
    "router-admin": names.PORT_ROUTER_ADMIN,
    "neighbours": names.PORT_ROUTER_NEIGHBOURS,
    "redis": names.PORT_REDIS,
}
SOCKET: Final = f"{RUN}/agent.sock"
ARENA: Final = f"{RUN}/arena"
DISK: Final = "/var/lib/kvist/disk"
# By the plan's token; the folder's name is the volume's.
SECRET_FILES: Final = {
    "path.redis-password": "/etc/kvist/redis-password/password",
    "path.redis-sentinel-password": "/etc/kvist/redis-sentinel-password/password",
    "path.redis-ca": "/etc/kvist/redis-ca/ca.crt",
    "path.object-store-credentials": "/etc/kvist/object-store/credentials",
    "path.encryption-keys": "/etc/kvist/encryption-keys/keys",
}
CONFIG: Final = "/etc/kvist/router"
ACCESS: Final = "/etc/kvist/access"
AGENT_TLS: Final = "/etc/kvist/agent-tls"
NEIGHBOUR_SUFFIX: Final = "-neighbours"
_EVERYWHERE: Final = "0.0.0.0"


def values(cluster: CacheCluster, context: Context) -> dict[str, str]:
    """By the token's name."""
    model = cluster.spec.model
    return {
        "host": _EVERYWHERE,
        "host.admin": _EVERYWHERE,
        # Kubernetes puts the variable's value in when the container starts.
        "replica": "$(POD_NAME)",
        "namespace": context.namespace,
        "service.engine": name_of(cluster, ENGINE),
        # The headless Service's name stands for the addresses of all pods.
        "peer.urls": f"http://{name_of(cluster, ENGINE)}.{context.namespace}.svc:{names.PORT_PEER}",
        "peer.address": "$(POD_IP)",
        "neighbour.urls": f"{_neighbour_scheme(cluster)}://{neighbour_service(cluster)}.{context.namespace}.svc"
        f":{names.PORT_ROUTER_NEIGHBOURS}",
        "path.model": inside(model.volume.path) if model.volume is not None else model.name,
        "path.config": CONFIG,
        "path.socket": SOCKET,
        "path.events": SOCKET + EVENTS_SUFFIX,
        "path.replay": SOCKET + REPLAY_SUFFIX,
        "path.arena": ARENA,
        "path.disk": DISK,
        "path.token": TOKEN_FILE,
        **{agent_tls_token(file): f"{AGENT_TLS}/{file}" for file in agent_tls_files(cluster)},
        **SECRET_FILES,
        "redis.urls": ",".join(redis_urls(cluster, context.namespace)),
        **{f"port.{name}": str(port) for name, port in PORTS.items()},
        **{f"lora.{a.name}": inside(a.path) if a.path[0] in "./" else a.path for a in model.lora_adapters},
    }


def _neighbour_scheme(cluster: CacheCluster) -> str:
    return "https" if agent_tls_files(cluster) else "http"


def neighbour_service(cluster: CacheCluster) -> str:
    """Name of the headless Service by which routers find each other."""
    return name_of(cluster, ROUTER) + NEIGHBOUR_SUFFIX


def redis_urls(cluster: CacheCluster, namespace: str) -> tuple[str, ...]:
    """Of a managed Redis; one address a pod, so that a key's place does not depend on a load balancer."""
    redis = cluster.spec.cache.remote.redis
    count = redis.managed.replicas if redis is not None and redis.managed is not None else 0
    name = name_of(cluster, REDIS)
    return tuple(f"redis://{name}-{i}.{name}.{namespace}.svc:{PORTS['redis']}" for i in range(count))


def inside(path: str) -> str:
    """A folder of the model's volume as the containers see it."""
    return str(PurePosixPath(MODELS) / path.lstrip("/"))


def container_ports(*port_names: str) -> list[dict[str, object]]:
    """Of a container."""
    return [{"name": name, "containerPort": PORTS[name], "protocol": "TCP"} for name in port_names]


def service_ports(*port_names: str) -> list[dict[str, object]]:
    """Of a Service; targets are named, so that a pod template may move them."""
    return [{"name": n, "port": PORTS[n], "targetPort": n, "protocol": "TCP"} for n in port_names]
