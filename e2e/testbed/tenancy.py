"""Namespaces of tests, and clusters in them that serve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from testbed.bed import BedError
from testbed.client import Client, service_client
from testbed.host_folders import Object, claims
from testbed.kube import Kubectl
from testbed.pods import Pods
from testbed.release import said
from testbed.scenario import SERVED, folders
from testbed.story import Story, story


@contextmanager
def tenant(kubectl: Kubectl) -> Iterator[str]:
    """A namespace that enforces the `restricted` Pod Security Standard."""
    name = f"e2e-{uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield name
    finally:
        kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@contextmanager
def machine_tenant(kubectl: Kubectl) -> Iterator[str]:
    """The same with claims on the checkout, its Python and a model."""
    with tenant(kubectl) as namespace:
        kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(claims(namespace, folders())))
        try:
            yield namespace
        finally:
            kubectl("delete", "pv", f"--selector=kvist.dev/e2e={namespace}", "--wait=false")


@dataclass(frozen=True)
class Served:
    """A CacheCluster, followed from its start."""

    kubectl: Kubectl
    namespace: str
    name: str
    story: Story
    pods: Pods

    def client(self) -> Client:
        """Of its router Service."""
        return service_client(self.kubectl, self.namespace, self.name, SERVED)

    def patch(self, change: Object) -> None:
        """Merge into the object."""
        self.kubectl("patch", f"cc/{self.name}", f"--namespace={self.namespace}", "--type=merge",
                     f"--patch={json.dumps(change)}")  # fmt: skip

    def ready(self, seconds: float = 900) -> None:
        """Wait for Ready of the current generation, and for all engines."""
        for condition in ("Ready", "EnginesReady", "CacheAware"):
            self.story.wait(condition, "True", seconds)

    def settled(self, seconds: float = 900) -> None:
        """Wait until everything is as wanted."""
        self.ready(seconds)
        self.story.wait("Progressing", "False", seconds)

    def engine(self, ordinal: int) -> dict[str, Any]:
        """The pod of an engine."""
        found = self.pods.get(f"{self.name}-engine-{ordinal}")
        if found is None:
            raise BedError(f"{self.name} has no engine {ordinal}")
        return found

    def parts(self, component: str) -> list[dict[str, Any]]:
        """Pods of a component."""
        return self.pods.component(self.name, component)


@contextmanager
def served(kubectl: Kubectl, namespace: str, manifest: Object, folder: Path) -> Iterator[Served]:
    """The cluster, applied; deleted at the end. Who wants it ready waits."""
    name = manifest["metadata"]["name"]
    kubectl("apply", f"--namespace={namespace}", "--filename=-", stdin=yaml.safe_dump(manifest))
    try:
        with story(kubectl, namespace, name, folder) as told:
            yield Served(kubectl, namespace, name, told, Pods(kubectl, namespace))
    except BedError as error:
        raise BedError(f"{error}\n{said(kubectl, namespace)}") from error
    finally:
        kubectl("delete", f"cc/{name}", f"--namespace={namespace}", "--ignore-not-found", "--wait=false")
