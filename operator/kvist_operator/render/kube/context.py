"""What rendering needs beside manifest and plan: values that only the operator knows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Images:
    """Container images of this release; the manifest may name others."""

    engine: str
    router: str
    agent: str
    redis: str


@dataclass(frozen=True)
class Context:
    """A snapshot, so that rendering stays a function of its arguments."""

    namespace: str
    uid: str
    images: Images
    kinds: frozenset[str] = frozenset()  # optional kinds the API server has, such as PodMonitor
    router_replicas_owned_by_hpa: bool = False  # then the Deployment says nothing about replicas
    engine_replicas: int | None = None  # what the StatefulSet shall run now; None: what the spec says
    operator_namespace: str = ""  # whose pods may ask routers and agents; "": of any namespace
    image_pull_secrets: tuple[str, ...] = ()
    pull_policy: str = ""  # "": Kubernetes' default for the image's tag
    docs_url: str = ""  # where docs/ is published, for runbook links
