"""The routers: Deployment, Service, ConfigMap and, on request, an autoscaler."""

from __future__ import annotations

from typing import Any, Final

from kvist_connector.names import PATH_HEALTHZ
from kvist_operator.plan import Plan, Program, fill, fill_yaml
from kvist_operator.plan.access import SECRET, access_files, access_token, has_keys
from kvist_operator.plan.agent_tls import agent_tls_files
from kvist_operator.plan.plan import NEIGHBOURS
from kvist_operator.render.kube.accounts import account
from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.meta import (
    CONFIG_HASH,
    ROUTER,
    Object,
    digest,
    labels,
    make,
    name_of,
    selector,
)
from kvist_operator.render.kube.pods import (
    SCRATCH,
    TOKEN_FILE,
    WRITABLE,
    Scheme,
    environment,
    folder_mount,
    http_probe,
    model_volume,
    pod_base,
    program,
    projected_volume,
    resources,
    scratch_volumes,
    secret_volume,
)
from kvist_operator.render.kube.secrets import control_token, tenants_secret
from kvist_operator.render.kube.values import (
    ACCESS,
    AGENT_TLS,
    CONFIG,
    NEIGHBOUR_SUFFIX,
    container_ports,
    service_ports,
    values,
)
from kvist_operator.render.merge import overlay
from kvist_operator.spec import CacheCluster

# After TERM requests are taken for 10 s more (limits.grace_seconds), then streams end (limits.drain_seconds).
_GRACE: Final = 150
_FETCHED: Final = f"{SCRATCH}/model"
_MODEL_FILES: Final = ("*.jinja", "config.json", "generation_config.json", "*token*.json", "vocab.json")
_REQUESTS: Final = {"cpu": "250m", "memory": "512Mi"}


def router_objects(cluster: CacheCluster, plan: Plan, context: Context) -> list[Object]:
    """ConfigMap, Deployment, Service, autoscaler."""
    filled = _values(cluster, context)
    files = {name: fill_yaml(text, filled) for name, text in plan.router.files.items()}
    config = make("v1", "ConfigMap", cluster, context.namespace, ROUTER) | {"data": files}
    service = make("v1", "Service", cluster, context.namespace, ROUTER) | {
        "spec": {"selector": selector(cluster, ROUTER), "ports": service_ports("router")}
    }
    deployment = _deployment(cluster, plan, context, digest(files))
    return [config, deployment, service, *_neighbours(cluster, plan, context), *_scaler(cluster, context)]


def _neighbours(cluster: CacheCluster, plan: Plan, context: Context) -> list[Object]:
    """The name by which routers find each other, those that are not ready too: they send as well."""
    if NEIGHBOURS not in plan.router.ports:
        return []
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector(cluster, ROUTER),
        "ports": service_ports(NEIGHBOURS),
    }
    return [make("v1", "Service", cluster, context.namespace, ROUTER, NEIGHBOUR_SUFFIX) | {"spec": spec}]


def _deployment(cluster: CacheCluster, plan: Plan, context: Context, config_hash: str) -> Object:
    spec = cluster.spec.router
    template = {
        "metadata": {
            "labels": labels(cluster, ROUTER),
            # A new configuration is a new pod.
            "annotations": {CONFIG_HASH: config_hash},
        },
        "spec": _pod(cluster, plan, context),
    }
    body: dict[str, Any] = {
        "selector": {"matchLabels": selector(cluster, ROUTER)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": overlay(template, spec.pod_template, "spec.router.podTemplate"),
    }
    if spec.autoscaling is None or not context.router_replicas_owned_by_hpa:
        body["replicas"] = _first_replicas(cluster)
    return make("apps/v1", "Deployment", cluster, context.namespace, ROUTER) | {"spec": body}


def _first_replicas(cluster: CacheCluster) -> int:
    spec = cluster.spec.router
    if spec.autoscaling is None:
        return spec.replicas
    return min(max(spec.replicas, spec.autoscaling.min_replicas), spec.autoscaling.max_replicas)


def _pod(cluster: CacheCluster, plan: Plan, context: Context) -> Object:
    pod = pod_base(cluster, context, ROUTER, account(cluster, ROUTER), _GRACE)
    volumes = [{"name": "config", "configMap": {"name": name_of(cluster, ROUTER)}}]
    volumes += [*scratch_volumes()[0], *model_volume(cluster)[0]]
    if plan.agent is not None:
        volumes.append(secret_volume("token", control_token(cluster), TOKEN_FILE.rpartition("/")[2]))
    volumes += _access_volume(cluster)
    if files := agent_tls_files(cluster):
        volumes.append(projected_volume("agent-tls", files))
    if cluster.spec.model.volume is None:
        pod["initContainers"] = [_model_files(cluster, context)]
    return pod | {
        # It watches the engines' EndpointSlices.
        "automountServiceAccountToken": True,
        "containers": [_container(cluster, plan.router, context, plan.agent is not None)],
        "volumes": volumes,
    }


def _access_volume(cluster: CacheCluster) -> list[Object]:
    """Keys, certificates and the secret of tenants as one folder, which follows its Secrets; or nothing."""
    files = {file.name: file.ref for file in access_files(cluster)}
    if has_keys(cluster):
        files[SECRET] = tenants_secret(cluster.name)
    return [projected_volume("access", files)] if files else []


def _values(cluster: CacheCluster, context: Context) -> dict[str, str]:
    found = values(cluster, context)
    files = (*(file.name for file in access_files(cluster)), SECRET)
    found |= {access_token(file): f"{ACCESS}/{file}" for file in files}
    return found if cluster.spec.model.volume is not None else {**found, "path.model": _FETCHED}


def _model_files(cluster: CacheCluster, context: Context) -> Object:
    """Tokenizer and chat template from the hub, so that tokens are derived here; weights stay there."""
    model, spec = cluster.spec.model, cluster.spec.router
    arguments = ["download", model.name, "--local-dir", _FETCHED]
    arguments += [word for pattern in _MODEL_FILES for word in ("--include", pattern)]
    if model.revision is not None:
        arguments += ["--revision", model.revision]
    # The engines' access to the hub is the routers' too.
    hub = tuple(variable for variable in cluster.spec.engine.env if variable.name.startswith("HF_"))
    env = {name: WRITABLE[name] for name in ("HOME", "HF_HOME", "TMPDIR")}
    env |= {"DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    image = spec.image or context.images.router
    return {
        **program("model-files", image, "huggingface_hub.cli.hf", arguments, context),
        "env": environment(env, (*hub, *spec.env)),
        "resources": resources(spec.resources, _REQUESTS),
        "volumeMounts": scratch_volumes()[1],
    }


def _container(cluster: CacheCluster, router: Program, context: Context, cached: bool) -> Object:
    spec = cluster.spec.router
    filled = _values(cluster, context)
    argv = [*(fill(a, filled) for a in router.argv), "--name", "$(POD_NAME)"]
    health = router.health
    mounts = [{"name": "config", "mountPath": CONFIG, "readOnly": True}, *scratch_volumes()[1]]
    mounts += model_volume(cluster)[1]
    if cached:
        mounts.append({"name": "token", "mountPath": TOKEN_FILE.rpartition("/")[0], "readOnly": True})
    if _access_volume(cluster):
        mounts.append(folder_mount("access", ACCESS))
    if agent_tls_files(cluster):
        mounts.append(folder_mount("agent-tls", AGENT_TLS))
    scheme: Scheme = "HTTPS" if health.tls else "HTTP"
    env = {"HOME": WRITABLE["HOME"], "TMPDIR": WRITABLE["TMPDIR"], **router.env}
    return {
        **program(ROUTER, spec.image or context.images.router, router.module, argv, context),
        "env": environment(env, spec.env),
        "ports": container_ports(*router.ports),
        "resources": resources(spec.resources, _REQUESTS),
        "startupProbe": http_probe(PATH_HEALTHZ, health.port, 1, int(health.deadline), scheme=scheme),
        "livenessProbe": http_probe(PATH_HEALTHZ, health.port, 10, 3, scheme=scheme),
        "readinessProbe": http_probe(health.path, health.port, 2, 2, scheme=scheme),
        "volumeMounts": mounts,
    }


def _scaler(cluster: CacheCluster, context: Context) -> list[Object]:
    scaling = cluster.spec.router.autoscaling
    if scaling is None:
        return []
    target = {"type": "Utilization", "averageUtilization": scaling.cpu_utilization}
    return [
        make("autoscaling/v2", "HorizontalPodAutoscaler", cluster, context.namespace, ROUTER)
        | {
            "spec": {
                "scaleTargetRef": {
                    "apiVersion": "apps/v1",
                    "kind": "Deployment",
                    "name": name_of(cluster, ROUTER),
                },
                "minReplicas": scaling.min_replicas,
                "maxReplicas": scaling.max_replicas,
                "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
            }
        }
    ]
