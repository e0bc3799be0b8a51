"""The agent beside an engine, with the volumes of its tiers."""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import Any, Final

from kvist_operator.plan import Program, VolumeKind, fill
from kvist_operator.plan.agent_tls import agent_tls_files
from kvist_operator.plan.peers import has_peers
from kvist_operator.plan.tiers import external_secrets
from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.meta import Object
from kvist_operator.render.kube.pods import (
    RUN,
    TOKEN_FILE,
    WRITABLE,
    Scheme,
    environment,
    folder_mount,
    http_probe,
    memory_volume,
    program,
    projected_volume,
    scratch_volumes,
    secret_volume,
)
from kvist_operator.render.kube.secrets import control_token, redis_password
from kvist_operator.render.kube.values import (
    AGENT_TLS,
    DISK,
    SECRET_FILES,
    container_ports,
    values,
)
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.amounts import round_up
from kvist_operator.spec.base import SecretRef

# Journal, sockets and lock files beside the arena.
_BESIDE_ARENA: Final = 64 * 1024**2
_HEAP: Final = 512 * 1024**2


def agent_container(cluster: CacheCluster, agent: Program, context: Context) -> Object:
    """A native sidecar: started before the engine, ended after it, never drained on its own."""
    filled = values(cluster, context)
    argv = [*(fill(a, filled) for a in agent.argv), "--http.token-file", TOKEN_FILE]
    health = agent.health
    mounts = [
        {"name": "kvist", "mountPath": RUN},
        _file_mount("token", TOKEN_FILE),
        *scratch_volumes()[1],
    ]
    if _size(agent, VolumeKind.DISK):
        mounts.append({"name": "disk", "mountPath": DISK})
    mounts += [_file_mount(name, file) for name, _, file in tier_secrets(cluster)]
    if agent_tls_files(cluster):
        mounts.append(folder_mount("agent-tls", AGENT_TLS))
    scheme: Scheme = "HTTPS" if health.tls else "HTTP"
    memory = str(agent_memory(agent))
    return {
        **program("agent", context.images.agent, agent.module, argv, context),
        "restartPolicy": "Always",
        "env": environment(
            {"HOME": WRITABLE["HOME"], "TMPDIR": WRITABLE["TMPDIR"], **agent.env}, pod_ip=has_peers(cluster)
        ),
        "ports": container_ports(*agent.ports),
        # It is the first to touch the arena, so its pages are charged here.
        "resources": {"requests": {"cpu": "100m", "memory": memory}, "limits": {"memory": memory}},
        "startupProbe": http_probe(health.path, health.port, 1, math.ceil(health.deadline), scheme=scheme),
        "livenessProbe": http_probe(health.path, health.port, 10, 6, scheme=scheme),
        "volumeMounts": mounts,
    }


def agent_memory(agent: Program) -> int:
    """Bytes: arena, what lies beside it, heap, and the catalog's share of arena and disk."""
    arena, disk = _size(agent, VolumeKind.ARENA), _size(agent, VolumeKind.DISK)
    total = arena + _BESIDE_ARENA + _HEAP + arena // 256 + disk // 4096
    return round_up(total)


def agent_volumes(cluster: CacheCluster, agent: Program) -> list[Object]:
    """Arena and socket in one volume, the token, the disk tier unless it is a claim."""
    arena, disk = _size(agent, VolumeKind.ARENA), _size(agent, VolumeKind.DISK)
    secrets = [("token", control_token(cluster), TOKEN_FILE), *tier_secrets(cluster)]
    volumes = [memory_volume("kvist", arena + _BESIDE_ARENA)]
    volumes += [secret_volume(name, ref, file.rpartition("/")[2]) for name, ref, file in secrets]
    if files := agent_tls_files(cluster):
        volumes.append(projected_volume("agent-tls", files))
    if disk and not disk_claims(cluster):
        # The tier keeps its own limit; the rest is for files that are being written.
        volumes.append({"name": "disk", "emptyDir": {"sizeLimit": str(disk + disk // 16 + _BESIDE_ARENA)}})
    return volumes


def tier_secrets(cluster: CacheCluster) -> list[tuple[str, SecretRef, str]]:
    """Volume, Secret and file of what the lower tiers need. Rotation: files are read again."""
    found = {token: secret.ref for token, secret in external_secrets(cluster).items()}
    if (password := redis_password(cluster)) is not None:
        found["path.redis-password"] = password
    return [
        (PurePosixPath(file).parent.name, found[token], file)
        for token, file in SECRET_FILES.items()
        if token in found
    ]


def _file_mount(volume: str, file: str) -> Object:
    return folder_mount(volume, file.rpartition("/")[0])


def disk_claims(cluster: CacheCluster) -> dict[str, Any]:
    """Fields of the StatefulSet for a disk tier on claims; empty for an emptyDir."""
    disk = cluster.spec.cache.disk
    if disk is None or disk.volume_claim_template is None:
        return {}
    body = dict(disk.volume_claim_template)
    body.setdefault("accessModes", ["ReadWriteOnce"])
    retention = disk.retention
    return {
        "volumeClaimTemplates": [{"metadata": {"name": "disk"}, "spec": body}],
        "persistentVolumeClaimRetentionPolicy": {
            "whenDeleted": retention.when_deleted,
            "whenScaled": retention.when_scaled,
        },
    }


def _size(agent: Program, kind: VolumeKind) -> int:
    return next((v.size for v in agent.volumes if v.kind is kind), 0)
