"""Users' Secrets that a spec names: whether they are there, and a mark of those in pods' environment.

Secrets are read by name only. Mounted ones change inside running pods; an environment is read once, so pods
roll when such a value changes: `mark_pods` puts its mark into the pod template. A mark has 16 bits: enough to
notice a change, too few to guess a secret from.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.control.api import Api
from kvist_operator.control.errors import Forbidden
from kvist_operator.control.resources import SECRETS, Object
from kvist_operator.render.kube.meta import LABEL_COMPONENT
from kvist_operator.spec import CacheCluster

MARK_ANNOTATION: Final = "kvist.dev/env-secrets"
_MARK_DIGITS: Final = 4
_OPAQUE: Final = frozenset({"podTemplate", "volumeClaimTemplate", "configMapKeyRef"})


@dataclass(frozen=True, order=True)
class Reference:
    """One value in a Secret, and the field of the spec that names it."""

    field: str
    name: str
    key: str
    optional: bool = False

    @property
    def component(self) -> str:
        """Whose environment it is in; empty for a Secret that is mounted."""
        parts = self.field.split(".")
        return parts[1] if len(parts) > 2 and parts[2].startswith("env[") else ""


@dataclass(frozen=True)
class Found:
    """`missing` tells what to do; `env` is a mark by component."""

    missing: tuple[str, ...]
    env: Mapping[str, str]


async def read_secrets(api: Api, raw: Object, cluster: CacheCluster) -> Found:
    """Read every Secret that the user's spec names."""
    listed = sorted(set(references(cluster)))
    namespace = raw["metadata"]["namespace"]
    answers = await asyncio.gather(*(_read(api, namespace, item) for item in listed))
    values: dict[str, list[str]] = {}
    for item, (_, value) in zip(listed, answers, strict=True):
        if item.component:
            values.setdefault(item.component, []).append(f"{item.name}/{item.key}={value}")
    marks = {component: _mark(raw["metadata"]["uid"], found) for component, found in values.items()}
    return Found(tuple(problem for problem, _ in answers if problem), marks)


def references(cluster: CacheCluster) -> Iterator[Reference]:
    """Every name and key of a Secret in the spec. Pure."""
    yield from _walk(cluster.spec.model_dump(by_alias=True), "spec")


def mark_pods(rendered: Iterable[Object], marks: Mapping[str, str]) -> tuple[Object, ...]:
    """The same objects, pod templates of marked components marked. Pure."""
    return tuple(_marked(obj, marks) for obj in rendered)


def _marked(obj: Object, marks: Mapping[str, str]) -> Object:
    mark = marks.get(obj["metadata"].get("labels", {}).get(LABEL_COMPONENT, ""))
    if mark is None or obj["kind"] not in ("StatefulSet", "Deployment"):
        return obj
    result = copy.deepcopy(obj)
    metadata = result["spec"]["template"].setdefault("metadata", {})
    annotations = metadata.setdefault("annotations", {}) if isinstance(metadata, dict) else None
    if not isinstance(annotations, dict):
        return obj  # a podTemplate replaced it by what the API server refuses, in its own words
    annotations[MARK_ANNOTATION] = mark
    return result


async def _read(api: Api, namespace: str, item: Reference) -> tuple[str, str]:
    """What is wrong, and the value as the API server holds it."""
    try:
        secret = await api.get(SECRETS, namespace, item.name)
    except Forbidden as error:
        return f"{item.field}: Secret {item.name} cannot be read: {error}", ""
    if secret is None and item.optional:
        return "", ""
    if secret is None:
        return f"{item.field}: Secret {item.name} does not exist in namespace {namespace}", ""
    value = (secret.get("data") or {}).get(item.key)
    if value is None and not item.optional:
        return f"{item.field}: Secret {item.name} has no key {item.key!r}", ""
    return "", "" if value is None else str(value)


def _mark(uid: str, values: list[str]) -> str:
    return hashlib.sha256("\0".join([uid, *values]).encode()).hexdigest()[:_MARK_DIGITS]


def _walk(value: Any, path: str) -> Iterator[Reference]:
    if isinstance(value, Mapping):
        if set(value) - {"optional"} == {"name", "key"} and value["name"]:
            optional = value.get("optional") is True
            yield Reference(path, str(value["name"]), str(value["key"]), optional)
        for name, inner in value.items():
            if name not in _OPAQUE:
                yield from _walk(inner, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from _walk(inner, f"{path}[{at}]")
