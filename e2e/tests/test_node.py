"""The node itself: what every other test with pods relies on."""

from __future__ import annotations

import pytest
import yaml

from testbed.bed import Bed, BedError
from testbed.host_folders import HostFolder, claims
from testbed.kube import Kubectl
from testbed.programs import CHECKOUT
from testbed.small_pods import apply, pod, ready

pytestmark = [pytest.mark.e2e_pod, pytest.mark.usefixtures("node")]
SERVE = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000)"
ASK = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=3).status)"


def server(kubectl: Kubectl, namespace: str) -> None:
    """A web server behind a Service."""
    probe = {"readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1}}
    ports = [{"port": 80, "targetPort": 8000}]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "server"},
        "spec": {"selector": {"app": "server"}, "ports": ports},
    }
    apply(kubectl, namespace, pod("server", "/usr/bin/python3", "-c", SERVE, container=probe), service)
    ready(kubectl, namespace, "server")


def ask(kubectl: Kubectl, namespace: str, source: str, url: str) -> str:
    """What a pod gets from a URL: the status, or the error."""
    command = ("exec", source, f"--namespace={namespace}", "--", "/usr/bin/python3", "-c", ASK, url)
    try:
        return kubectl(*command).strip()
    except BedError as error:
        return str(error)


def test_services_and_names_work_and_policies_are_enforced(kubectl: Kubectl, namespace: str) -> None:
    server(kubectl, namespace)
    apply(kubectl, namespace, *(pod(name, "sleep", "600") for name in ("friend", "stranger")))
    ready(kubectl, namespace, "friend", "stranger")
    url = f"http://server.{namespace}.svc/"
    assert ask(kubectl, namespace, "friend", url) == "200"
    assert ask(kubectl, namespace, "stranger", url) == "200"
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "friends"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "server"}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}]}],
        },
    }
    apply(kubectl, namespace, policy)
    refused = 0
    for _ in range(20):  # the firewall follows within seconds
        refused = refused + 1 if ask(kubectl, namespace, "stranger", url) != "200" else 0
        if refused == 2:
            break
    assert refused == 2
    assert ask(kubectl, namespace, "friend", url) == "200"


def test_a_restricted_pod_reads_a_folder_of_the_machine(kubectl: Kubectl, namespace: str) -> None:
    folder = HostFolder("checkout", CHECKOUT)
    mount = {"name": "checkout", "mountPath": str(CHECKOUT), "readOnly": True}
    volume = {"name": "checkout", "persistentVolumeClaim": {"claimName": "checkout", "readOnly": True}}
    kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(claims(namespace, [folder])))
    try:
        script = f"head -1 {CHECKOUT}/pyproject.toml; touch {CHECKOUT}/x 2>&1 || true; id -u; sleep 600"
        apply(kubectl, namespace, pod("reader", "sh", "-c", script, container={"volumeMounts": [mount]},
                                      volumes=[volume]))  # fmt: skip
        ready(kubectl, namespace, "reader")
        logged = kubectl("logs", "reader", f"--namespace={namespace}")
        assert "[build-system]" in logged
        assert "Read-only file system" in logged
        assert "10001" in logged
    finally:
        kubectl("delete", "pv", f"--selector=kvist.dev/e2e={namespace}", "--wait=false")


def test_a_pod_cannot_ask_for_the_machine_itself(kubectl: Kubectl, namespace: str) -> None:
    volume = {"name": "root", "hostPath": {"path": "/"}}
    with pytest.raises(BedError, match="restricted"):
        apply(kubectl, namespace, pod("greedy", "sleep", "1", volumes=[volume]))


def test_the_bed_knows_the_cgroup_of_every_container(kubectl: Kubectl, namespace: str, here: Bed) -> None:
    apply(kubectl, namespace, pod("sleeper", "sh", "-c", "cat /proc/self/cgroup; sleep 600"))
    ready(kubectl, namespace, "sleeper")
    groups = kubectl("logs", "sleeper", f"--namespace={namespace}").splitlines()
    assert {group.rpartition("/")[2] for group in groups} <= {path.name for path in here.containers.iterdir()}
