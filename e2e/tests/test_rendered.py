"""The API server takes every object that a manifest becomes, in a namespace that is `restricted`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvist_operator.plan import make_plan
from kvist_operator.plan.target import kube_target
from kvist_operator.render.kube import Context, Images, render
from kvist_operator.spec.cluster import load
from testbed.kube import Kubectl
from testbed.programs import CHECKOUT

pytestmark = pytest.mark.e2e_api
EXAMPLES = sorted((CHECKOUT / "examples").glob("*.yaml"))
IMAGES = Images("kvist.dev/engine:e2e", "kvist.dev/router:e2e", "kvist.dev/engine:e2e", "kvist.dev/redis:e2e")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_objects_of_every_example_are_accepted(kubectl: Kubectl, namespace: str, example: Path) -> None:
    cluster = load(example)
    context = Context(namespace, "0", IMAGES, pull_policy="Never")
    objects = render(cluster, make_plan(cluster, kube_target(cluster)), context)
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
    assert len(said.splitlines()) == len(objects)
