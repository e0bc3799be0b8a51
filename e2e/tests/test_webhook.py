"""The validating webhook as the chart configures it, called by a real API server; its operator is no pod."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvist_connector.testing.ports import free_port
from testbed.bed import BedError
from testbed.kube import Kubectl
from testbed.operator_process import OperatorProcess, operator
from testbed.release import ACCOUNT, CHART, Helm, refusals, released, said, values
from testbed.waiting import until

pytestmark = pytest.mark.usefixtures("crd")
KINDS = ("Secret", "ValidatingWebhookConfiguration")
SETTING = "KVIST_OPERATOR_WEBHOOK__"


def cluster(**engine: Any) -> str:
    """One whose memory tier is too small for its longest prompt."""
    spec = {"model": {"name": "owner/Model-8B"}, "engine": {"maxModelLen": 32768, **engine}}
    metadata = {"name": "demo"}
    return yaml.safe_dump(
        {"apiVersion": "kvist.dev/v1alpha1", "kind": "CacheCluster", "metadata": metadata, "spec": spec}
    )


class Webhook:
    """The chart's objects in a namespace; `url` replaces the Service, behind which there is no pod."""

    def __init__(self, kubectl: Kubectl, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kubectl = kubectl
        self.namespace = namespace
        self.port = free_port(kubectl.bed.machine)
        given = values(namespace, webhook={"enabled": True})
        text = Helm(kubectl)(
            "template", ACCOUNT, str(CHART), f"--namespace={namespace}", "--values=-", stdin=json.dumps(given)
        )
        objects = [item for item in yaml.safe_load_all(text) if item and item["kind"] in KINDS]
        self.secret, self.configuration = (
            next(item["metadata"]["name"] for item in objects if item["kind"] == kind) for kind in KINDS
        )
        for item in objects:
            for hook in item.get("webhooks", ()):
                hook["clientConfig"] = {"url": f"https://{kubectl.bed.machine}:{self.port}/validate"}
        kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(objects))
        for name, value in (
            ("CONFIGURATION", self.configuration),
            ("SECRET", self.secret),
            ("SERVICE", self.secret),
            ("NAMES", f"[{kubectl.bed.machine}]"),
            ("PORT", str(self.port)),
            ("SECONDS", "0.5"),
        ):
            monkeypatch.setenv(f"{SETTING}{name}", value)

    def bundle(self) -> str:
        """What the API server trusts, in base64; empty before anyone wrote it."""
        found = self.kubectl.get(f"validatingwebhookconfiguration/{self.configuration}")
        (hook,) = found["webhooks"]
        return str(hook["clientConfig"].get("caBundle") or "")

    def serves(self, port: int) -> bool:
        """Whether what answers there has a certificate by an authority in the Secret."""
        data = self.kubectl.get(f"secret/{self.secret}", f"--namespace={self.namespace}")["data"]
        trust = ssl.create_default_context(cadata=base64.b64decode(data["ca.crt"]).decode())
        address = (self.kubectl.bed.machine, port)
        try:
            with (
                socket.create_connection(address, timeout=5) as plain,
                trust.wrap_socket(plain, server_hostname=address[0]),
            ):
                return True
        except OSError:
            return False

    def apply(self, manifest: str) -> str:
        """What kubectl warns of. BedError when it is refused."""
        return applied(self.kubectl, self.namespace, manifest)


def applied(kubectl: Kubectl, namespace: str, manifest: str, *flags: str) -> str:
    """What kubectl warns of. BedError when it is refused."""
    command = [str(kubectl.catalogue.path("kubectl")), f"--kubeconfig={kubectl.bed.kubeconfig}", "apply"]
    done = subprocess.run(
        [*command, f"--namespace={namespace}", "--filename=-", *flags],
        input=manifest, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if done.returncode:
        raise BedError(done.stderr)
    return done.stderr


@pytest.fixture
def webhook(kubectl: Kubectl, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    made = Webhook(kubectl, namespace, monkeypatch)
    yield made
    kubectl("delete", f"validatingwebhookconfiguration/{made.configuration}")


@contextmanager
def answering(webhook: Webhook, folder: Path) -> Iterator[OperatorProcess]:
    """An operator that the API server calls by now."""
    with operator(webhook.kubectl, webhook.namespace, folder, "first") as process:
        log = process.log.read_text
        until("authorities in the configuration", lambda: bool(webhook.bundle()), 60, lambda: log()[-2000:])
        until("the certificate", lambda: webhook.serves(webhook.port), 60, lambda: log()[-2000:])
        manifest = yaml.safe_load(cluster())
        manifest["metadata"]["name"] = "probe"
        dry = ("create", "--dry-run=server", f"--namespace={webhook.namespace}", "--filename=-")
        wrong = {"spec": {"volumes": [{"name": "a"}, {"name": "a"}]}}
        manifest["spec"]["engine"]["podTemplate"] = wrong

        def called() -> bool:
            try:
                webhook.kubectl(*dry, stdin=yaml.safe_dump(manifest))
            except BedError:
                return True
            return False

        # The API server reads its configurations a moment after they are written.
        until("the API server's calls", called, 60, lambda: log()[-2000:])
        yield process


@pytest.mark.e2e_api
def test_what_will_disappoint_is_warned_of_and_what_cannot_be_is_refused(
    webhook: Webhook, tmp_path: Path
) -> None:
    with answering(webhook, tmp_path):
        warning = webhook.apply(cluster())
        assert "Warning: spec.cache.memory: 1Gi: one prompt of 32768 tokens takes about 1.8 GiB" in warning
        with pytest.raises(
            BedError, match=r"denied the request: spec\.engine\.podTemplate.*'a' is given twice"
        ):
            webhook.apply(cluster(podTemplate={"spec": {"volumes": [{"name": "a"}, {"name": "a"}]}}))
        assert webhook.kubectl.get("cc/demo", f"--namespace={webhook.namespace}") is not None


@pytest.mark.e2e_api
def test_without_a_webhook_objects_are_admitted(webhook: Webhook, tmp_path: Path) -> None:
    with answering(webhook, tmp_path) as process:
        process.kill()
        assert "Warning: spec." not in webhook.apply(cluster())
        webhook.kubectl("delete", "cc/demo", f"--namespace={webhook.namespace}", "--timeout=30s")


@pytest.mark.e2e_api
def test_an_object_under_deletion_is_not_looked_at(webhook: Webhook, tmp_path: Path) -> None:
    place = f"--namespace={webhook.namespace}"
    wrong = yaml.safe_load(cluster(podTemplate={"spec": {"volumes": [{"name": "a"}, {"name": "a"}]}}))
    wrong["metadata"]["finalizers"] = ["example.com/held"]
    webhook.apply(yaml.safe_dump(wrong))
    with answering(webhook, tmp_path):
        webhook.kubectl("delete", "cc/demo", place, "--wait=false")
        webhook.kubectl(
            "patch", "cc/demo", place, "--type=merge", '--patch={"metadata": {"finalizers": null}}'
        )
        until("its end", lambda: webhook.kubectl.get("cc/demo", place) is None, 30)


@pytest.mark.e2e_api
def test_every_operator_serves_what_the_leader_made(
    webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(webhook, tmp_path):
        before = webhook.bundle()
        other = free_port(webhook.kubectl.bed.machine)
        monkeypatch.setenv(f"{SETTING}PORT", str(other))
        with operator(webhook.kubectl, webhook.namespace, tmp_path, "second") as second:
            until("its certificate", lambda: webhook.serves(other), 60, second.log.read_text)
        assert webhook.bundle() == before


@pytest.mark.e2e_pod
@pytest.mark.usefixtures("node")
@pytest.mark.timeout(600)
def test_an_installed_webhook_warns_through_its_service_and_survives_an_upgrade(
    kubectl: Kubectl, namespace: str
) -> None:
    helm, name = Helm(kubectl), f"{namespace}-{ACCOUNT}-webhook"

    def warned() -> bool:
        return "Warning: spec.cache.memory" in applied(kubectl, namespace, cluster(), "--dry-run=server")

    def log() -> str:
        return said(kubectl, namespace)

    with released(helm, namespace, webhook={"enabled": True}):
        until("a warning", warned, 120, log)
        before = kubectl.get(f"validatingwebhookconfiguration/{name}")["webhooks"]
        given = values(namespace, webhook={"enabled": True}, podLabels={"upgraded": "yes"})
        helm("upgrade", ACCOUNT, str(CHART), f"--namespace={namespace}", "--values=-", "--wait",
             "--timeout=120s", stdin=json.dumps(given))  # fmt: skip
        assert kubectl.get(f"validatingwebhookconfiguration/{name}")["webhooks"] == before
        until("a warning after the upgrade", warned, 120, log)
        assert refusals(kubectl, namespace) == []
    assert kubectl.get(f"validatingwebhookconfiguration/{name}") is None
