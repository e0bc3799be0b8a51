"""What all pods share: restricted Pod Security, writable folders, environment, probes, spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.meta import Object, selector
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.base import EnvVar, Resources, SecretRef

# One non-root user and group for all programs, so that they share socket, arena and volumes.
Scheme = Literal["HTTP", "HTTPS"]
USER: Final = 10001
SCRATCH: Final = "/var/cache/kvist"
RUN: Final = "/run/kvist"
MODELS: Final = "/models"
TOKEN_FILE: Final = "/etc/kvist/token/token"
# What engines and their libraries write to; the root file system is read-only.
WRITABLE: Final = {
    "HOME": SCRATCH,
    "USER": "kvist",  # the user has no entry in the image's passwd
    "HF_HOME": f"{SCRATCH}/huggingface",
    "VLLM_CACHE_ROOT": f"{SCRATCH}/vllm",
    "VLLM_CONFIG_ROOT": f"{SCRATCH}/vllm-config",
    "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/inductor",
    "TRITON_CACHE_DIR": f"{SCRATCH}/triton",
    "XDG_CACHE_HOME": f"{SCRATCH}/xdg",
    "TMPDIR": "/tmp",
}
_PYTHON: Final = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}


def pod_security() -> Object:
    """Pod Security Standard `restricted`."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Object:
    """Of every container."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def pulled(image: str, context: Context) -> Object:
    """The image of a container, and how it is pulled."""
    return {"image": image, **({"imagePullPolicy": context.pull_policy} if context.pull_policy else {})}


def program(name: str, image: str, module: str, argv: Iterable[str], context: Context) -> Object:
    """A container that runs `python3 -m module`; `command` alone can be overlaid with another Python."""
    return {
        "name": name,
        **pulled(image, context),
        "command": ["python3"],
        "args": ["-m", module, *argv],
        "securityContext": container_security(),
    }


def environment(values: Mapping[str, str], user: Iterable[EnvVar] = (), pod_ip: bool = False) -> list[Object]:
    """POD_NAME (and POD_IP) first, since others refer to it; a user's variable replaces one of ours."""
    fields = {"POD_NAME": "metadata.name"} | ({"POD_IP": "status.podIP"} if pod_ip else {})
    pod = [{"name": n, "valueFrom": {"fieldRef": {"fieldPath": path}}} for n, path in fields.items()]
    listed: dict[str, Object] = {
        name: {"name": name, "value": value} for name, value in {**_PYTHON, **values}.items()
    }
    for variable in user:
        if variable.value_from is not None:
            listed[variable.name] = {"name": variable.name, "valueFrom": variable.value_from}
        else:
            listed[variable.name] = {"name": variable.name, "value": variable.value or ""}
    return [*pod, *listed.values()]


def resources(given: Resources, defaults: Mapping[str, Any] | None = None) -> Object:
    """As the user gave them; `defaults` are requests where neither request nor limit is given."""
    requests = {**(defaults or {}), **given.requests}
    kept = {k: v for k, v in requests.items() if k in given.requests or k not in given.limits}
    filled = {"requests": kept, "limits": dict(given.limits)}
    return {
        key: {name: str(amount) for name, amount in value.items()} for key, value in filled.items() if value
    }


def http_probe(
    path: str, port: str, period: int, failures: int, timeout: int = 5, scheme: Scheme = "HTTP"
) -> Object:
    """GET until it answers 200. The kubelet checks no certificate."""
    return {
        "httpGet": {"path": path, "port": port, **({} if scheme == "HTTP" else {"scheme": scheme})},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": timeout,
    }


def memory_volume(name: str, size: int) -> Object:
    """tmpfs, whose pages are charged to the container that first touches them."""
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}


def secret_volume(name: str, secret: SecretRef, file: str) -> Object:
    """One key of a Secret as the file `file`; the kubelet updates it when the Secret changes."""
    items = [{"key": secret.key, "path": file}]
    return {"name": name, "secret": {"secretName": secret.name, "items": items, "defaultMode": 0o440}}


def projected_volume(name: str, files: Mapping[str, SecretRef]) -> Object:
    """Keys of several Secrets as files of one folder, which follows its Secrets."""
    sources = [
        {"secret": {"name": secret.name, "items": [{"key": secret.key, "path": file}]}}
        for file, secret in files.items()
    ]
    return {"name": name, "projected": {"sources": sources, "defaultMode": 0o440}}


def folder_mount(volume: str, folder: str) -> Object:
    """Read-only."""
    return {"name": volume, "mountPath": folder, "readOnly": True}


def model_volume(cluster: CacheCluster) -> tuple[list[Object], list[Object]]:
    """Volumes and mounts of the model's claim."""
    volume = cluster.spec.model.volume
    if volume is None:
        return [], []
    claim = {"claimName": volume.claim_name, "readOnly": True}
    return (
        [{"name": "model", "persistentVolumeClaim": claim}],
        [{"name": "model", "mountPath": MODELS, "readOnly": True}],
    )


def scratch_volumes() -> tuple[list[Object], list[Object]]:
    """Writable folders of a container with a read-only root."""
    return (
        [{"name": "scratch", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
        [{"name": "scratch", "mountPath": SCRATCH}, {"name": "tmp", "mountPath": "/tmp"}],
    )


def spread(cluster: CacheCluster, component: str) -> list[Object]:
    """Over zones and nodes where there are several; never a reason not to run."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector(cluster, component)},
        }
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]


def pod_base(cluster: CacheCluster, context: Context, component: str, account: str, grace: int) -> Object:
    """The parts of a pod's spec that do not depend on its programs."""
    secrets = [{"name": name} for name in context.image_pull_secrets]
    return {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "terminationGracePeriodSeconds": grace,
        "topologySpreadConstraints": spread(cluster, component),
        **({"imagePullSecrets": secrets} if secrets else {}),
    }
