"""The chart of this checkout, installed with helm."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from testbed.bed import BedError
from testbed.kube import Kubectl
from testbed.programs import CHECKOUT, tools_folder

CHART = CHECKOUT / "charts" / "kvist"
ACCOUNT = "kvist"


def image(name: str) -> dict[str, str]:
    """An image of the bed as chart values."""
    return {"repository": f"kvist.dev/{name}", "tag": "e2e"}


def values(namespace: str, **more: Any) -> dict[str, Any]:
    """For an operator that serves its own namespace only: tests with operators do not meet."""
    images = {name: image(name) for name in ("engine", "router", "redis")}
    return {
        "replicas": 1,
        "image": {**image("operator"), "pullPolicy": "Never"},
        "images": {**images, "pullPolicy": "Never"},
        "watchNamespaces": [namespace],
        "crds": {"enabled": False},
        **more,
    }


@dataclass(frozen=True)
class Helm:
    """helm of this bed."""

    kubectl: Kubectl

    def __call__(self, *arguments: str, stdin: str | None = None, seconds: float = 180) -> str:
        """Its output. BedError with its message."""
        program = str(self.kubectl.catalogue.path("helm"))
        # helm's own folders: nothing of the user's configuration matters here.
        home = {
            f"HELM_{name}_HOME": str(tools_folder() / "helm-home") for name in ("CACHE", "CONFIG", "DATA")
        }
        done = subprocess.run(
            [program, f"--kubeconfig={self.kubectl.bed.kubeconfig}", *arguments],
            input=stdin, capture_output=True, text=True, timeout=seconds, check=False,
            env={**os.environ, **home},
        )  # fmt: skip
        if done.returncode:
            raise BedError(f"helm {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout


@contextmanager
def released(helm: Helm, namespace: str, **more: Any) -> Iterator[str]:
    """A release in a namespace, with its operator ready; uninstalled at the end. Yields its name."""
    try:
        try:
            helm("upgrade", "--install", ACCOUNT, str(CHART), f"--namespace={namespace}", "--values=-",
                 "--wait", "--timeout=120s", stdin=json.dumps(values(namespace, **more)))  # fmt: skip
        except BedError as error:
            raise BedError(f"{error}\n{said(helm.kubectl, namespace)}") from error
        yield ACCOUNT
    finally:
        helm("uninstall", ACCOUNT, f"--namespace={namespace}", "--ignore-not-found", "--wait",
             "--timeout=120s")  # fmt: skip


def said(kubectl: Kubectl, namespace: str) -> str:
    """The end of what the operator logged, or why there is none."""
    try:
        return kubectl("logs", f"deployment/{ACCOUNT}", f"--namespace={namespace}", "--tail=30")
    except BedError as error:
        return str(error)


def refusals(kubectl: Kubectl, namespace: str, account: str = ACCOUNT) -> list[str]:
    """Calls of a release's account that its roles did not allow, from the audit log.

    A namespace that ends takes nothing new from anybody, which says nothing about roles.
    """
    user = f"system:serviceaccount:{namespace}:{account}"
    events = map(json.loads, (kubectl.bed.log / "audit.log").read_text().splitlines())
    mine = [event for event in events if event["user"]["username"] == user]
    if not mine:
        raise BedError(f"{user} asked for nothing: the audit log is not what it should be")
    refused = (event for event in mine if event["responseStatus"].get("code") == 403)
    return [
        f"{event['verb']} {event['requestURI']}"
        for event in refused
        if "because it is being terminated" not in event["responseStatus"].get("message", "")
    ]
