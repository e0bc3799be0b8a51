"""Small pods that the `restricted` Pod Security Standard admits, for tests that need no engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from testbed.kube import Kubectl
from testbed.scenario import ENGINE_IMAGE

RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
# Accepts connections on every port it is given, and says nothing.
LISTEN = """
import selectors, socket, sys
waiting = selectors.DefaultSelector()
for port in map(int, sys.argv[1:]):
    waiting.register(socket.create_server(("", port)), selectors.EVENT_READ)
while True:
    for key, _ in waiting.select():
        key.fileobj.accept()[0].close()
"""
# Prints which of `address:port` can be connected to; what is refused or dropped cannot.
CONNECT = """
import concurrent.futures, json, socket, sys
def connects(place):
    try:
        socket.create_connection(place.rsplit(":", 1), timeout=3).close()
        return True
    except OSError:
        return False
with concurrent.futures.ThreadPoolExecutor(64) as threads:
    found = zip(sys.argv[1:], threads.map(connects, sys.argv[1:]))
    print(json.dumps([place for place, open in found if open]))
"""


def pod(name: str, *command: str, labels: Mapping[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """A pod labelled `app: NAME` or as told; `container` and the rest of its spec can be given."""
    container = {
        "name": "main",
        "image": ENGINE_IMAGE,
        "imagePullPolicy": "Never",
        "command": list(command),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        **spec.pop("container", {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {"app": name})},
        "spec": {"securityContext": RESTRICTED, "containers": [container], "restartPolicy": "Never",
                 "terminationGracePeriodSeconds": 1, **spec},
    }  # fmt: skip


def listener(name: str, labels: Mapping[str, str], ports: Iterable[int]) -> dict[str, Any]:
    """A pod that is ready when it listens on all of the ports."""
    numbers = [str(port) for port in ports]
    probe = {"tcpSocket": {"port": int(numbers[-1])}, "periodSeconds": 1}
    command = ("/usr/bin/python3", "-c", LISTEN, *numbers)
    return pod(name, *command, labels=labels, container={"readinessProbe": probe})


def apply(kubectl: Kubectl, namespace: str, *objects: dict[str, Any]) -> None:
    """Create or change objects in a namespace."""
    kubectl("apply", f"--namespace={namespace}", "--filename=-", stdin=yaml.safe_dump_all(objects))


def ready(kubectl: Kubectl, namespace: str, *names: str) -> None:
    """Wait until the pods are ready."""
    pods = tuple(f"pod/{name}" for name in names)
    kubectl("wait", *pods, f"--namespace={namespace}", "--for=condition=Ready", "--timeout=120s", seconds=130)


def connects(kubectl: Kubectl, namespace: str, name: str, places: Iterable[str]) -> set[str]:
    """Which of `address:port` a pod can connect to."""
    command = ("exec", name, f"--namespace={namespace}", "--", "/usr/bin/python3", "-c", CONNECT)
    return set(json.loads(kubectl(*command, *places)))
