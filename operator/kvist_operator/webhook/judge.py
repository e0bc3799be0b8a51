"""AdmissionReview in, AdmissionReview out. Pure; called by server.py.

What cannot be carried out is refused here as the operator would refuse it later; what disappoints is warned
of. An object that was refused before may be changed step by step, and one under deletion is let alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_connector.errors import ConfigError
from kvist_operator.plan import kube_target, make_plan
from kvist_operator.render.kube import Context, render
from kvist_operator.spec import CacheCluster, parse
from kvist_operator.webhook.advice import advice

API: Final = "admission.k8s.io/v1"
KIND: Final = "AdmissionReview"
# The API server cuts warnings at this length when all of them together are too long.
LONGEST: Final = 256
_METADATA: Final = ("name", "namespace", "labels", "annotations")
_GENERATED: Final = "00000"  # as long as what the API server appends to generateName


class ReviewError(ValueError):
    """The body is no AdmissionReview of this version; the message says what is missing."""


@dataclass(frozen=True)
class Verdict:
    """`denial` is empty for an object that is admitted."""

    denial: str = ""
    warnings: tuple[str, ...] = ()


def review(body: Any, context: Context) -> dict[str, Any]:
    """The answer for the API server; raises ReviewError."""
    request = body.get("request") if isinstance(body, dict) else None
    if not isinstance(request, dict) or (body.get("apiVersion"), body.get("kind")) != (API, KIND):
        raise ReviewError(f"the body is no {KIND} of {API} with a request")
    uid, new, old = request.get("uid"), request.get("object"), request.get("oldObject")
    if not isinstance(uid, str) or not isinstance(new, dict):
        raise ReviewError("request.uid and request.object are needed: the webhook is for CREATE and UPDATE")
    verdict = judge(new, old if isinstance(old, dict) else None, context)
    response: dict[str, Any] = {"uid": uid, "allowed": not verdict.denial}
    if verdict.denial:
        response["status"] = {"code": 422, "reason": "Invalid", "message": verdict.denial}
    if verdict.warnings:
        response["warnings"] = [text[:LONGEST] for text in verdict.warnings]
    return {"apiVersion": API, "kind": KIND, "response": response}


def judge(new: Mapping[str, Any], old: Mapping[str, Any] | None, context: Context) -> Verdict:
    """`old` is None when the object is being created."""
    leaving = _metadata(new).get("deletionTimestamp") is not None
    if leaving or (old is not None and old.get("spec") == new.get("spec")):
        return Verdict()
    found = _cluster(new, context)
    if isinstance(found, CacheCluster):
        return Verdict(warnings=advice(found))
    if old is not None and not isinstance(_cluster(old, context), CacheCluster):
        return Verdict(warnings=(found,))
    return Verdict(denial=found)


def _cluster(obj: Mapping[str, Any], context: Context) -> CacheCluster | str:
    """The typed cluster, or why it cannot be carried out."""
    given = _metadata(obj)
    metadata = {name: given[name] for name in _METADATA if name in given}
    if "name" not in metadata and given.get("generateName"):
        metadata["name"] = f"{given['generateName']}{_GENERATED}"
    body = {**{name: obj.get(name) for name in ("apiVersion", "kind", "spec")}, "metadata": metadata}
    try:
        cluster = parse(body)
        render(cluster, make_plan(cluster, kube_target(cluster)), context)
    except ConfigError as error:
        return str(error)
    return cluster


def _metadata(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    found = obj.get("metadata")
    return found if isinstance(found, dict) else {}
