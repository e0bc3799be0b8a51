"""The rendered objects run: an engine with its agent, a router that finds it, a warm hit through the Service.

The operator is left out: the test makes the Secrets and opens the readiness gate itself.
"""

from __future__ import annotations

import json
import secrets

import pytest
import yaml

from kvist_operator.plan import make_plan
from kvist_operator.plan.target import kube_target
from kvist_operator.render.kube import READINESS_GATE, Context, Images, generated_secrets, render
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.cluster import parse
from testbed.client import decision, service_client
from testbed.kube import Kubectl
from testbed.scenario import ENGINE_IMAGE, SERVED, cache_cluster
from testbed.waiting import until

pytestmark = [pytest.mark.e2e_pod, pytest.mark.usefixtures("node"), pytest.mark.timeout(900)]
IMAGES = Images(ENGINE_IMAGE, "kvist.dev/router:e2e", ENGINE_IMAGE, "kvist.dev/redis:e2e")


def apply(kubectl: Kubectl, namespace: str, objects: list[dict]) -> None:
    kubectl("apply", "--server-side", f"--namespace={namespace}", "--filename=-",
            stdin=yaml.safe_dump_all(objects))  # fmt: skip


def secret_objects(cluster: CacheCluster) -> list[dict]:
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": wanted.name, "labels": wanted.labels},
            "stringData": {wanted.key: secrets.token_hex(16)},
        }
        for wanted in generated_secrets(cluster)
    ]


def open_gate(kubectl: Kubectl, namespace: str, pod: str) -> None:
    condition = {"type": READINESS_GATE, "status": "True"}
    patch = json.dumps({"status": {"conditions": [condition]}})
    kubectl("patch", f"pod/{pod}", f"--namespace={namespace}", "--subresource=status", f"--patch={patch}")


def test_a_second_request_reuses_what_the_first_computed(kubectl: Kubectl, machine_folders: str) -> None:
    namespace = machine_folders
    cluster = parse(cache_cluster("demo"))
    context = Context(namespace, "0", IMAGES, pull_policy="Never")
    apply(kubectl, namespace, secret_objects(cluster))
    apply(kubectl, namespace, list(render(cluster, make_plan(cluster, kube_target(cluster)), context)))
    until("the engine's pod", lambda: kubectl.get("pod/demo-engine-0", f"--namespace={namespace}"), 60)
    kubectl("wait", "pod/demo-engine-0", f"--namespace={namespace}", "--for=condition=ContainersReady",
            "--timeout=600s", seconds=610)  # fmt: skip
    open_gate(kubectl, namespace, "demo-engine-0")
    kubectl("rollout", "status", "deployment/demo-router", f"--namespace={namespace}", "--timeout=120s",
            seconds=130)  # fmt: skip
    client = service_client(kubectl, namespace, "demo", SERVED)
    cold, warm = client.complete(), client.complete()
    assert cold.text == warm.text
    assert cold.predicted == 0
    assert warm.predicted >= 512
    assert warm.replica == "demo-engine-0"
    actual = decision(kubectl, namespace, "demo", warm.request)["actual"]
    assert sum(actual["hit_tokens"].values()) >= 512
