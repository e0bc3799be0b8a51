"""Small CacheClusters and what they are rendered to, for tests of the operator."""

from __future__ import annotations

from typing import Any, Final

from kvist_operator import spec
from kvist_operator.plan import kube_target, make_plan
from kvist_operator.render.kube import Context, Images, render

CONTEXT: Final = Context("apps", "uid-1", Images("engine:1", "router:1", "agent:1", "redis:1"))


def cluster(**sections: Any) -> spec.CacheCluster:
    """Named `test`, with these sections of the spec."""
    return spec.parse(
        {
            "apiVersion": "kvist.dev/v1alpha1",
            "kind": "CacheCluster",
            "metadata": {"name": "test"},
            "spec": {"model": {"name": "owner/model"}, **sections},
        }
    )


def rendered(found: spec.CacheCluster, context: Context = CONTEXT) -> dict[tuple[str, str], dict[str, Any]]:
    """Its Kubernetes objects by kind and name, each of which there is once."""
    objects = render(found, make_plan(found, kube_target(found)), context)
    named = {(item["kind"], item["metadata"]["name"]): item for item in objects}
    assert len(named) == len(objects)
    return named
