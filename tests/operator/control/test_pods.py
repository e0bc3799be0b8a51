"""Pod objects as the kubelet writes them, read for decisions."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from kvist_operator.control.pods import pod_of
from kvist_operator.render.kube import READINESS_GATE

NOW = datetime.datetime(2026, 1, 1, 12, 0, tzinfo=datetime.UTC)


def read(status: dict[str, Any] | None = None, spec: dict[str, Any] | None = None, **meta: Any) -> Any:
    metadata = {"name": "demo-engine-7", "uid": "u", **meta}
    return pod_of({"metadata": metadata, "spec": spec or {}, "status": status or {}}, "engine", NOW)


def conditions(**states: str) -> list[dict[str, str]]:
    return [{"type": name, "status": status} for name, status in states.items()]


def test_a_pod_that_was_just_made_is_nothing_yet() -> None:
    pod = read()
    assert (pod.ordinal, pod.ready, pod.serving, pod.terminating, pod.broken, pod.gate) == (
        7,
        False,
        False,
        False,
        "",
        None,
    )


def test_readiness_is_read_from_conditions_and_gates() -> None:
    spec = {"readinessGates": [{"conditionType": READINESS_GATE}]}
    shut = read({"conditions": conditions(ContainersReady="True", Ready="False")}, spec)
    assert (shut.serving, shut.ready, shut.gate) == (True, False, False)
    listed = [*conditions(ContainersReady="True", Ready="True"), {"type": READINESS_GATE, "status": "True"}]
    assert (read({"conditions": listed}, spec).ready, read({"conditions": listed}, spec).gate) == (True, True)


def unschedulable(message: str) -> dict[str, Any]:
    told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"conditions": [told]}


@pytest.mark.parametrize(
    "message",
    [
        '0/1 nodes are available: persistentvolumeclaim "models" not found. preemption: not helpful.',
        "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
    ],
)
def test_a_claim_that_is_missing_or_unbound_is_no_want_of_room(message: str) -> None:
    broken = read(unschedulable(message)).broken
    assert broken.startswith(f"Unschedulable: no node takes it ({message}); create the PersistentVolumeClaim")
    assert "add a node" not in broken


@pytest.mark.parametrize(
    ("status", "reason", "remedy"),
    [
        (
            unschedulable("0/1 nodes are available: 1 Insufficient cpu."),
            "Unschedulable: no node takes it (0/1 nodes are available: 1 Insufficient cpu.)",
            "add a node that fits, or ask for less in resources",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": "engine",
                        "ready": False,
                        "restartCount": 4,
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": {"exitCode": 2, "reason": "Error"}},
                    }
                ]
            },
            "CrashLoopBackOff: container engine keeps ending (last exit code 2)",
            "read its log: kubectl logs --previous",
        ),
        (
            {
                "initContainerStatuses": [
                    {
                        "name": "agent",
                        "ready": False,
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                    }
                ]
            },
            "OOMKilled: container agent used more memory than its limit",
            "raise its memory limit",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": "engine",
                        "ready": False,
                        "image": "none:1",
                        "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}},
                    }
                ]
            },
            "ImagePullBackOff: container engine (none:1)",
            "check the image's name and imagePullSecrets",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": "engine",
                        "ready": False,
                        "restartCount": 3,
                        "state": {"running": {}},
                        "lastState": {"terminated": {"exitCode": 1}},
                    }
                ]
            },
            "CrashLoopBackOff: container engine keeps ending (last exit code 1)",
            "read its log: kubectl logs --previous",
        ),
        ({"phase": "Failed", "reason": "Evicted"}, "Evicted: it ended", "see kubectl describe pod"),
    ],
)
def test_what_will_not_mend_itself_is_told_with_a_remedy(
    status: dict[str, Any], reason: str, remedy: str
) -> None:
    assert read(status).broken == f"{reason}; {remedy}"


@pytest.mark.parametrize(
    "container",
    [
        {"ready": False, "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}},
        {"ready": False, "restartCount": 1, "state": {"running": {}}, "lastState": {"terminated": {}}},
        {"ready": True, "restartCount": 9, "state": {"running": {}}, "lastState": {"terminated": {}}},
    ],
)
def test_what_only_takes_time_is_not_broken(container: dict[str, Any]) -> None:
    assert read({"containerStatuses": [{"name": "engine", **container}]}).broken == ""


@pytest.mark.parametrize(("deleted", "stuck"), [("11:59:30", False), ("11:58:30", True), ("12:05:00", False)])
def test_a_pod_long_past_its_grace_period_is_stuck(deleted: str, stuck: bool) -> None:
    pod = read(deletionTimestamp=f"2026-01-01T{deleted}Z")
    assert (pod.terminating, pod.stuck, pod.broken) == (True, stuck, "")


def test_ports_are_found_by_name_in_all_containers() -> None:
    spec = {
        "initContainers": [{"name": "agent", "ports": [{"name": "agent", "containerPort": 9200}]}],
        "containers": [{"name": "engine", "ports": [{"containerPort": 1}]}],
    }
    pod = read(spec=spec)
    assert (pod.port("agent", 8200), pod.port("router-admin", 8081)) == (9200, 8081)
