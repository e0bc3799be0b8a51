"""The API server takes every object that a manifest becomes, in a namespace that is `restricted`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvist_operator.plan import make_plan
from kvist_operator.plan.target import kube_target
from kvist_operator.render.kube import Context, Images, render
from kvist_operator.spec.cluster import CacheCluster, load, parse
from testbed.kube import Kubectl
from testbed.programs import CHECKOUT

pytestmark = pytest.mark.e2e_api
EXAMPLES = sorted((CHECKOUT / "examples").glob("*.yaml"))
VARIANTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("variants.yaml").read_text())
IMAGES = Images("kvist.dev/engine:e2e", "kvist.dev/router:e2e", "kvist.dev/engine:e2e", "kvist.dev/redis:e2e")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_objects_of_every_example_are_accepted(kubectl: Kubectl, namespace: str, example: Path) -> None:
    accepted(kubectl, namespace, load(example))


@pytest.mark.usefixtures("crd")
@pytest.mark.parametrize("name", VARIANTS)
def test_the_objects_of_every_section_are_accepted(kubectl: Kubectl, namespace: str, name: str) -> None:
    spec = {"model": {"name": "owner/model"}, **VARIANTS[name]}
    manifest = {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "CacheCluster",
        "metadata": {"name": name},
        "spec": spec,
    }
    said = created(kubectl, namespace, [manifest])
    assert said == [f"cachecluster.kvist.dev/{name} created (server dry run)"]
    accepted(kubectl, namespace, parse(manifest))


def accepted(kubectl: Kubectl, namespace: str, cluster: CacheCluster) -> None:
    context = Context(namespace, "0", IMAGES, pull_policy="Never")
    objects = render(cluster, make_plan(cluster, kube_target(cluster)), context)
    assert len(created(kubectl, namespace, objects)) == len(objects)


def created(kubectl: Kubectl, namespace: str, objects: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the API server says of a trial."""
    # Strict: unknown fields are errors. Warnings are errors too: Pod Security warns of templates that
    # would be refused as pods, and the API server of deprecated fields.
    said = kubectl(
        "create",
        "--dry-run=server",
        "--validate=strict",
        "--warnings-as-errors",
        f"--namespace={namespace}",
        "--filename=-",
        stdin=yaml.safe_dump_all(objects),
    )
    return said.splitlines()
