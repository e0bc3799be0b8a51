"""From the previous version to this one and back, with live clusters: what holds a cache is not made anew.

Routers hold none: a version may give their pods another template, and more objects to a cluster.

Chart, CRD and operator are those of e2e/previous first, then those of the checkout; each acts with the rights
of its chart. Pods are made by the real controllers and stay Pending; one that is replaced has another uid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.installed import installed_operator
from testbed.kube import Kubectl
from testbed.operator_process import OperatorProcess
from testbed.programs import CHECKOUT, E2E
from testbed.release import ACCOUNT, CHART, Helm, refusals, values
from testbed.scenario import cache_cluster
from testbed.waiting import until

pytestmark = [pytest.mark.e2e_api, pytest.mark.timeout(300)]
PREVIOUS = next((E2E / "previous").glob("kvist-*.tgz"))
PACKAGES = next((E2E / "previous").glob("kvist_operator-*.zip"))
CRD = CHECKOUT / "crds" / "cachecluster.yaml"
KINDS = (
    "pods,statefulset,deployment,service,configmap,secret,serviceaccount,role,rolebinding,networkpolicy,"
    "poddisruptionbudget,horizontalpodautoscaler"
)
HELM = ("--values=-", "--take-ownership", "--force-conflicts", "--timeout=60s")


class Upgrade:
    """One release in a namespace with the CRD, moved between versions."""

    def __init__(self, kubectl: Kubectl, namespace: str, folder: Path) -> None:
        self.kubectl = kubectl
        self.namespace = namespace
        self.folder = folder
        self.helm = Helm(kubectl)
        self.where = f"--namespace={namespace}"

    def to(self, chart: Path) -> None:
        """Install or upgrade."""
        given = json.dumps(values(self.namespace, crds={"enabled": True}))
        self.helm("upgrade", "--install", ACCOUNT, str(chart), self.where, *HELM, stdin=given)

    @contextmanager
    def operator(self, identity: str, packages: Path | None = None) -> Iterator[OperatorProcess]:
        """Of the release, of this version or with other packages."""
        with installed_operator(
            self.kubectl, self.namespace, self.folder, identity, packages=packages
        ) as process:
            yield process

    def apply(self, name: str, **cache: Any) -> None:
        """A cluster with a Redis of its own."""
        manifest = cache_cluster(name, **({"remote": {"redis": {"managed": {}}}} | cache))
        self.kubectl("apply", self.where, "--filename=-", stdin=yaml.safe_dump(manifest))

    def look(self, name: str, operator: OperatorProcess) -> None:
        """Wait until the operator has gone through a change of the cluster that concerns no pod."""
        patch = {"spec": {"monitoring": {"scrapeInterval": f"{operator.process.pid}s"}}}
        self.kubectl("patch", f"cc/{name}", self.where, "--type=merge", f"--patch={json.dumps(patch)}")

        def current() -> bool:
            found = self.kubectl.get(f"cc/{name}", self.where)
            return found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"]

        until(f"a status by {operator.identity}", current, 60, lambda: operator.log.read_text()[-2000:])

    def live(self, name: str) -> dict[str, tuple[str, Any]]:
        """Everything of the cluster but routers' pods: the uid, and what pods with a cache are made from."""
        found = self.kubectl.get(KINDS, self.where, f"--selector=app.kubernetes.io/instance={name}")
        items = [*found["items"], self.kubectl.get(f"cc/{name}", self.where)]
        return {
            f"{item['kind']}/{item['metadata']['name']}": (
                item["metadata"]["uid"],
                item["spec"]["template"] if item["kind"] == "StatefulSet" else None,
            )
            for item in items
            if not (item["kind"] == "Pod" and item["metadata"]["name"].startswith(f"{name}-router-"))
        }

    def kept(self, name: str, made: dict[str, tuple[str, Any]]) -> dict[str, tuple[str, Any] | None]:
        """What has become of that which was made."""
        now = self.live(name)
        return {item: now.get(item) for item in made}

    def schema(self) -> Any:
        """Of the CacheCluster kind, as it is served."""
        return self.kubectl.get("crd/cacheclusters.kvist.dev")["spec"]["versions"][0]["schema"]


@pytest.fixture
def upgrade(kubectl: Kubectl, namespace: str, tmp_path: Path, crd: str) -> Iterator[Upgrade]:
    made = Upgrade(kubectl, namespace, tmp_path)
    yield made
    kubectl("delete", "cc", "--all", made.where, "--timeout=30s")
    # Its hook is a pod, which does not run here.
    made.helm("uninstall", ACCOUNT, made.where, "--ignore-not-found", "--no-hooks")
    kubectl("apply", "--server-side", "--force-conflicts", f"--filename={CRD}")
    kubectl("wait", f"crd/{crd}", "--for=condition=Established", "--timeout=30s")


def test_clusters_live_on_through_an_upgrade_and_a_rollback(upgrade: Upgrade) -> None:
    (wanted,) = (version["schema"] for version in yaml.safe_load(CRD.read_text())["spec"]["versions"])
    upgrade.to(PREVIOUS)
    before = upgrade.schema()
    with upgrade.operator("previous", PACKAGES) as operator:
        upgrade.apply("demo")
        upgrade.look("demo", operator)
        until("pods", lambda: "Pod/demo-engine-0" in upgrade.live("demo"), 60)
        made = upgrade.live("demo")
        assert {"StatefulSet/demo-engine", "Deployment/demo-router", "StatefulSet/demo-redis"} <= set(made)

    upgrade.to(CHART)
    assert upgrade.schema() == wanted
    with upgrade.operator("this") as operator:
        upgrade.look("demo", operator)
        assert upgrade.kept("demo", made) == made
        assert refusals(upgrade.kubectl, upgrade.namespace) == []

    upgrade.helm("rollback", ACCOUNT, "1", upgrade.where, "--force-conflicts", "--timeout=60s")
    assert upgrade.schema() == before
    with upgrade.operator("back", PACKAGES) as operator:
        upgrade.look("demo", operator)
        assert upgrade.live("demo") == made
