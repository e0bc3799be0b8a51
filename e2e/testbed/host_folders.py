"""Folders of the machine for pods of namespaces that enforce `restricted`, which forbids hostPath volumes.

A PersistentVolume may be a folder of the node, and a claim on it is allowed everywhere: the administrator
decides what is offered, not the pod. Engines get the checkout and its Python that way, 6 GB that no image
needs to hold, mounted read-only at the machine's own paths, which its scripts and links name.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.programs import CHECKOUT

Object = dict[str, Any]
SIZE = "1Gi"


@dataclass(frozen=True)
class HostFolder:
    """One folder of the machine, offered to one namespace."""

    name: str
    path: Path

    def objects(self, namespace: str) -> list[Object]:
        """The volume and its claim, bound to each other."""
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": self.name, "namespace": namespace},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "resources": {"requests": {"storage": SIZE}},
                "volumeName": f"{namespace}-{self.name}",
            },
        }
        return [self.volume(namespace, "ReadOnlyMany"), claim]

    def volume(self, namespace: str, mode: str) -> Object:
        """The volume, for the claim of its name that is there or will be."""
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-{self.name}", "labels": {"kvist.dev/e2e": namespace}},
            "spec": {
                "accessModes": [mode],
                "storageClassName": "",
                "capacity": {"storage": SIZE},
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(self.path), "type": "Directory"},
                "claimRef": {"namespace": namespace, "name": self.name},
            },
        }


def environment_folders() -> tuple[HostFolder, ...]:
    """What the checkout's Python needs: the checkout with its .venv, and the Python that .venv refers to."""
    python = CHECKOUT / ".venv" / "bin" / "python"
    asked = subprocess.run(
        [python, "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True, check=True
    )
    return HostFolder("checkout", CHECKOUT), HostFolder("python", Path(asked.stdout.strip()))


def claims(namespace: str, folders: Iterable[HostFolder]) -> list[Object]:
    """All objects that give a namespace the folders."""
    return [item for folder in folders for item in folder.objects(namespace)]


def engine_overlay(folders: Iterable[HostFolder]) -> Object:
    """spec.engine.podTemplate: the folders in engine and agent, and this checkout's Python first."""
    folders = tuple(folders)
    mounts = [{"name": f.name, "mountPath": str(f.path), "readOnly": True} for f in folders]
    volumes = [
        {"name": f.name, "persistentVolumeClaim": {"claimName": f.name, "readOnly": True}} for f in folders
    ]
    path = {"name": "PATH", "value": f"{CHECKOUT / '.venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin"}
    return {
        "spec": {
            "containers": [{"name": "engine", "env": [path], "volumeMounts": mounts}],
            "initContainers": [{"name": "agent", "env": [path], "volumeMounts": mounts}],
            "volumes": volumes,
        }
    }
