"""What the tests with pods deploy: one small model on CPU engines, with the machine's environment mounted."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from testbed.host_folders import HostFolder, Object, engine_overlay, environment_folders
from testbed.programs import CHECKOUT, tools_folder

MODEL = "demo/SmolLM2-135M-Instruct"
SERVED = "smollm2"
ENGINE_IMAGE = "kvist.dev/engine:e2e"


def model_folder() -> HostFolder:
    """The demo's model where any user may read it."""
    target = tools_folder() / "models" / SERVED
    if not target.exists():
        half = target.with_name(f".{SERVED}.partial")
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(prepared(), half)
        for path in (half, *half.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        half.replace(target)
    return HostFolder("model", target)


def prepared() -> Path:
    """The demo's model, converted unless it is there: the folder is what the command prints last."""
    command = [str(CHECKOUT / ".venv" / "bin" / "kvist"), "model", "fetch-demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return Path(done.stdout.strip().splitlines()[-1])


def folders() -> tuple[HostFolder, ...]:
    """What a namespace with a cluster needs of the machine."""
    return (*environment_folders(), model_folder())


def cache_cluster(name: str, replicas: int = 1, **cache: Any) -> Object:
    """A CacheCluster that fits this node."""
    return {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "CacheCluster",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": MODEL, "servedName": SERVED, "volume": {"claimName": "model"}},
            "engine": {
                "image": ENGINE_IMAGE,
                "replicas": replicas,
                "device": "cpu",
                "kvCacheMemory": "256Mi",
                "maxModelLen": 4096,
                "shmSize": "256Mi",
                "drainDeadline": "20s",
                "resources": {"requests": {"cpu": "200m", "memory": "1Gi"}},
                "podTemplate": engine_overlay(environment_folders()),
            },
            "cache": {"memory": "128Mi", **cache},
            "router": {"replicas": 1, "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}}},
        },
    }
