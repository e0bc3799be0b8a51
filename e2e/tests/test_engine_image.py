"""images/Containerfile.engine over a stand-in for a vLLM image: what it adds works, the rest stays."""

from __future__ import annotations

import json

import pytest

from testbed.bed import Bed
from testbed.built import PINS, build, shipped_engine
from testbed.images import ImageStore
from testbed.kube import Kubectl
from testbed.packages import need_packages
from testbed.programs import catalogue
from testbed.small_pods import apply, pod, ready
from testbed.waiting import LONG_PAUSE, until

pytestmark = [pytest.mark.e2e_pod, pytest.mark.usefixtures("node"), pytest.mark.timeout(900)]
DESCRIBE = """
import importlib.metadata as m, json, os, shutil, sys
print(json.dumps({"uid": os.getuid(), "safe": sys.flags.safe_path, "agent": shutil.which("kvist-agent"),
                  "versions": {name: m.version(name) for name in ("numpy", "pydantic")}}))
"""


@pytest.fixture(scope="module")
def image(here: Bed) -> str:
    """Built unless it is in the cache, and in the node."""
    need_packages("images")
    recipe, store = shipped_engine(), ImageStore(here, catalogue())
    store.load(build(recipe))
    return recipe.reference


def said(kubectl: Kubectl, namespace: str, name: str) -> str:
    """What a pod that ends well printed."""
    where = f"--namespace={namespace}"
    ended = "--for=jsonpath={.status.phase}=Succeeded"
    kubectl("wait", f"pod/{name}", where, ended, "--timeout=180s", seconds=190)
    return kubectl("logs", name, where)


def test_it_says_what_it_is(kubectl: Kubectl, namespace: str, image: str) -> None:
    # The image's own command: vLLM's entry point is gone.
    apply(kubectl, namespace, pod("help", container={"image": image}))
    assert "Kvist cache agent" in said(kubectl, namespace, "help")


def test_what_vllm_pins_stays_and_the_user_is_not_root(kubectl: Kubectl, namespace: str, image: str) -> None:
    apply(kubectl, namespace, pod("describe", "python3", "-c", DESCRIBE, container={"image": image}))
    found = json.loads(said(kubectl, namespace, "describe"))
    assert found["versions"] == dict(pin.split("==") for pin in PINS)
    assert (found["uid"], found["safe"]) == (10001, True)
    assert found["agent"]


def test_its_agent_runs_with_a_read_only_root(kubectl: Kubectl, namespace: str, image: str) -> None:
    folder = "/run/kvist"
    command = ("python3", "-m", "kvist_connector", "--replica=one", f"--socket={folder}/agent.sock",
               f"--arena={folder}/arena", "--memory=16Mi")  # fmt: skip
    container = {"image": image, "volumeMounts": [{"name": "run", "mountPath": folder}]}
    volumes = [{"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}}]
    apply(kubectl, namespace, pod("agent", *command, container=container, volumes=volumes))
    ready(kubectl, namespace, "agent")

    def log() -> str:
        return kubectl("logs", "agent", f"--namespace={namespace}")

    until("the agent", lambda: "ready: replica=one" in log(), 180, log, LONG_PAUSE)
