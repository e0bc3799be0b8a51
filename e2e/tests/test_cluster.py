"""A CacheCluster from apply to delete, by the chart's operator, with real engines."""

from __future__ import annotations

import pytest
import yaml

from kvist_operator.render.kube.values import DISK
from testbed.client import decision, service_client
from testbed.kube import Kubectl
from testbed.load import prompts
from testbed.release import Helm, refusals, released
from testbed.scenario import SERVED, cache_cluster
from testbed.waiting import until

pytestmark = [
    pytest.mark.e2e_pod,
    pytest.mark.usefixtures("node", "crd"),
    pytest.mark.timeout(1200),
]
ARENA = 128 * 1024**2
STAT = "cat /sys/fs/cgroup/memory/memory.stat /sys/fs/cgroup/memory.stat 2>/dev/null || true"


def shared_memory(kubectl: Kubectl, namespace: str, container: str) -> int:
    """Bytes of shared memory that the container's cgroup, of version 1 or 2, is charged for."""
    words = ("exec", "demo-engine-0", f"--namespace={namespace}", f"--container={container}", "--")
    lines = kubectl(*words, "sh", "-c", STAT).splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("shmem "))


def chunks_on_disk(kubectl: Kubectl, namespace: str, pod: str) -> int:
    """What the agent has written behind."""
    words = ("exec", pod, f"--namespace={namespace}", "--container=agent", "--")
    return int(kubectl(*words, "sh", "-c", f"find {DISK} -name '*.kvist' -size +4k | wc -l"))


def wait_for(kubectl: Kubectl, namespace: str, condition: str) -> None:
    """As a person does."""
    kubectl("wait", "cc/demo", f"--namespace={namespace}", f"--for=condition={condition}", "--timeout=600s",
            seconds=610)  # fmt: skip


def test_apply_ready_warm_hit_delete(kubectl: Kubectl, machine_folders: str) -> None:
    namespace = machine_folders
    with released(Helm(kubectl), namespace):
        kubectl(
            "apply", f"--namespace={namespace}", "--filename=-",
            stdin=yaml.safe_dump(cache_cluster("demo", replicas=2, disk={"size": "256Mi"})),
        )  # fmt: skip
        wait_for(kubectl, namespace, "Ready")
        # Ready means that a request succeeds: the first one does.
        client = service_client(kubectl, namespace, "demo", SERVED)
        assert client.chat("Which tree bears acorns?").tokens > 0
        wait_for(kubectl, namespace, "EnginesReady")
        for prompt in prompts():
            cold, warm = client.chat(prompt), client.chat(prompt)
            assert cold.text == warm.text
            assert cold.predicted == 0
            # Of two engines the one that has it.
            assert (warm.predicted >= 512, warm.replica) == (True, cold.replica)
            actual = decision(kubectl, namespace, "demo", warm.request)["actual"]
            assert sum(actual["hit_tokens"].values()) >= 512
        until("chunks on disk", lambda: chunks_on_disk(kubectl, namespace, warm.replica) > 0, 60)
        # The agent touches the arena first, so it pays for it, not the engine.
        assert shared_memory(kubectl, namespace, "agent") >= ARENA
        assert shared_memory(kubectl, namespace, "engine") < ARENA
        kubectl("delete", "cc/demo", f"--namespace={namespace}", "--timeout=60s", seconds=70)
        selector = "--selector=app.kubernetes.io/instance=demo"
        until("no pods", lambda: not kubectl.get("pods", f"--namespace={namespace}", selector), 120)
        assert refusals(kubectl, namespace) == []
