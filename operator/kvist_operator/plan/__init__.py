"""From a manifest to the programs that make the cluster. Pure; imports no Kubernetes code."""

from kvist_operator.plan.plan import make_plan
from kvist_operator.plan.program import (
    TOKEN,
    Health,
    Plan,
    Program,
    Role,
    Volume,
    VolumeKind,
    fill,
    fill_yaml,
)
from kvist_operator.plan.target import Target, cpu_target, cuda_target, kube_target

__all__ = [
    "TOKEN",
    "Health",
    "Plan",
    "Program",
    "Role",
    "Target",
    "Volume",
    "VolumeKind",
    "cpu_target",
    "cuda_target",
    "fill",
    "fill_yaml",
    "kube_target",
    "make_plan",
]
