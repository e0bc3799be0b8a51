"""Schema of `.status`, which the operator writes and nobody else. Called by crd.py."""

from __future__ import annotations

from typing import Any, Final

_MOST_ENGINES: Final = 1024


def status_schema() -> dict[str, Any]:
    """Structural, every field described."""
    return _object(
        "What the operator found. Written by it alone.",
        {
            "observedGeneration": _integer("metadata.generation that the conditions are about."),
            "conditions": _conditions(),
            "replicas": _integer("Engine pods that are not ending; read by the scale subresource."),
            "readyReplicas": _integer("Engine pods that are ready."),
            "selector": _text("Label selector of the engine pods; read by the scale subresource.", 1024),
            "endpoint": _text("Base URL of the OpenAI API inside the Kubernetes cluster.", 512),
            "hit": _text("Share of prompt tokens that were reused, as text; - before any request.", 32),
            "figures": _figures(),
            "engines": _engines(),
        },
    )


def _conditions() -> dict[str, Any]:
    fields = {
        "type": _text(
            "Ready, EnginesReady, BackendReady, RouterReady, CacheAware, Progressing or Degraded", 64
        ),
        "status": {
            "type": "string",
            "enum": ["True", "False", "Unknown"],
            "description": "Whether it holds for observedGeneration.",
        },
        "reason": _text("Why, as a constant; docs/operations.md has the list.", 128),
        "message": _text("Why and what to do, for people.", 32768),
        "observedGeneration": _integer("metadata.generation that this condition is about."),
        "lastTransitionTime": {
            "type": "string",
            "format": "date-time",
            "maxLength": 64,
            "description": "When status changed last.",
        },
    }
    required = ["type", "status", "reason", "message", "lastTransitionTime"]
    return {
        "type": "array",
        "description": "State by condition. Ready: a request through the router would succeed now.",
        "maxItems": 32,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": _object("One condition.", fields) | {"required": required},
    }


def _figures() -> dict[str, Any]:
    return _object(
        "Reuse since the routers started, rounded; absent before any request.",
        {
            "requestHitPercent": _integer("Requests that reused at least one chunk, percent."),
            "tokenHitPercent": _integer("Prompt tokens that were reused, percent."),
            "savedSecondsEstimated": _integer("Prefill time saved, seconds, estimated."),
        },
    )


def _engines() -> dict[str, Any]:
    fields = {
        "name": _text("Name of the pod.", 253),
        "ready": _flag("Whether the pod is ready."),
        "current": _flag("Whether it is of the current revision."),
        "mirrored": _flag("Whether every router mirrors what it holds."),
        "draining": _flag("Whether it hands over its work and chunks before it goes."),
        "problem": _text("Why it will not become ready by waiting, and what to do.", 4096),
    }
    return {
        "type": "array",
        "description": "Engine pods.",
        "maxItems": _MOST_ENGINES,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
        "items": _object("One engine pod.", fields) | {"required": ["name"]},
    }


def _object(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "description": description, "properties": properties}


def _text(description: str, longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest, "description": description}


def _integer(description: str) -> dict[str, Any]:
    return {"type": "integer", "format": "int64", "minimum": 0, "description": description}


def _flag(description: str) -> dict[str, Any]:
    return {"type": "boolean", "description": description}
