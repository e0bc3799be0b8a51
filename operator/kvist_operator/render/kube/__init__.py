"""Plan -> Kubernetes objects. Pure: the same objects for the same arguments."""

from kvist_operator.render.kube.context import Context, Images
from kvist_operator.render.kube.meta import CONFIG_HASH, MANAGER, READINESS_GATE, endpoint, labels, selector
from kvist_operator.render.kube.objects import render
from kvist_operator.render.kube.secrets import GeneratedSecret, generated_secrets

__all__ = [
    "CONFIG_HASH",
    "MANAGER",
    "READINESS_GATE",
    "Context",
    "GeneratedSecret",
    "Images",
    "endpoint",
    "generated_secrets",
    "labels",
    "render",
    "selector",
]
