"""The CacheCluster kind as a real API server takes it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.kube import Kubectl
from testbed.programs import CHECKOUT

pytestmark = [pytest.mark.e2e_api, pytest.mark.usefixtures("crd")]
# With the objects that stand beside a cluster, such as an autoscaler.
EXAMPLES = sorted((CHECKOUT / "examples").rglob("*.yaml"))
MINIMAL = CHECKOUT / "examples" / "minimal-cpu.yaml"


def manifest(path: Path = MINIMAL) -> dict[str, Any]:
    """The CacheCluster of an example."""
    found = [item for item in yaml.safe_load_all(path.read_text()) if item and item["kind"] == "CacheCluster"]
    return copy.deepcopy(found[0])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_accepted_whole(kubectl: Kubectl, namespace: str, example: Path) -> None:
    # Strict validation: a field that the schema would drop is an error.
    said = kubectl(
        "create", "--dry-run=server", "--validate=strict", f"--namespace={namespace}", f"--filename={example}"
    )
    assert all(line.endswith("created (server dry run)") for line in said.splitlines())
    assert said


def test_the_short_name_lists_the_printer_columns(kubectl: Kubectl, namespace: str) -> None:
    create(kubectl, namespace, manifest())
    header, row = kubectl("get", "cc", f"--namespace={namespace}").splitlines()
    assert header.split() == ["NAME", "READY", "REPLICAS", "HIT", "ENDPOINT", "AGE"]
    assert row.split()[0] == manifest()["metadata"]["name"]
    wide, _ = kubectl("get", "cc", "--output=wide", f"--namespace={namespace}").splitlines()
    assert wide.split() == [*header.split(), "REASON"]


def test_an_autoscaler_scales_through_the_scale_subresource(kubectl: Kubectl, namespace: str) -> None:
    create(kubectl, namespace, manifest())
    name = manifest()["metadata"]["name"]
    kubectl("scale", f"cc/{name}", "--replicas=3", f"--namespace={namespace}")
    assert kubectl.get(f"cc/{name}", f"--namespace={namespace}")["spec"]["engine"]["replicas"] == 3


def test_status_is_a_subresource_that_the_spec_does_not_touch(kubectl: Kubectl, namespace: str) -> None:
    create(kubectl, namespace, manifest() | {"status": {"endpoint": "nowhere"}})
    name = manifest()["metadata"]["name"]
    assert "status" not in kubectl.get(f"cc/{name}", f"--namespace={namespace}")
    patch = '{"status": {"endpoint": "somewhere"}}'
    kubectl("patch", f"cc/{name}", "--subresource=status", "--type=merge", f"--patch={patch}",
            f"--namespace={namespace}")  # fmt: skip
    found = kubectl.get(f"cc/{name}", f"--namespace={namespace}")
    assert found["status"]["endpoint"] == "somewhere"
    assert found["metadata"]["generation"] == 1


def create(kubectl: Kubectl, namespace: str, body: dict[str, Any], *flags: str) -> None:
    """Create it with strict validation."""
    kubectl(
        "create",
        "--validate=strict",
        f"--namespace={namespace}",
        "--filename=-",
        *flags,
        stdin=yaml.safe_dump(body),
    )
