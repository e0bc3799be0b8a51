"""Plan -> Kubernetes objects. Pure: the same objects for the same arguments."""

from kvist_operator.render.kube.context import Context, Images
from kvist_operator.render.kube.meta import CONFIG_HASH, MANAGER, READINESS_GATE, endpoint, labels, selector
from kvist_operator.render.kube.objects import render
from kvist_operator.render.kube.secrets import GeneratedSecret, control_token, generated_secrets, own_token

__all__ = [
    "CONFIG_HASH",
    "MANAGER",
    "READINESS_GATE",
    "Context",
    "GeneratedSecret",
    "Images",
    "control_token",
    "endpoint",
    "generated_secrets",
    "labels",
    "own_token",
    "render",
    "selector",
]
