"""`python -m kvist_operator.crd`: the CustomResourceDefinition, generated from the typed spec.

crds/cachecluster.yaml is its output; a test compares the two. The schema is structural, as
Kubernetes demands: references inlined, no null alternatives, every object with a type.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any, Final

import yaml

from kvist_connector.names import API_VERSION, KIND
from kvist_operator.crd_status import status_schema
from kvist_operator.spec import CacheCluster

_GROUP: Final = API_VERSION.split("/")[0]
_VERSION: Final = API_VERSION.split("/")[1]
_PLURAL: Final = "cacheclusters"
_KEPT: Final = (
    "description",
    "type",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
)
# What a reader of `kubectl explain` and of the API server's refusal needs beside the pattern.
_QUANTITY_NOTE: Final = "A quantity: bytes, or a number with k, M, G, T, P, Ki, Mi, Gi, Ti or Pi, as 512Mi."
_DURATION_NOTE: Final = "A duration: seconds, or a number with ms, s, m, h or d, as 30s or 90m."
_PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"


def crd() -> dict[str, Any]:
    """The object for the API server."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{_PLURAL}.{_GROUP}"},
        "spec": {
            "group": _GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": _PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["cc"],
            },
            "scope": "Namespaced",
            "versions": [_version()],
        },
    }


def schema() -> dict[str, Any]:
    """openAPIV3Schema of the object."""
    source = CacheCluster.model_json_schema(by_alias=True, mode="validation")
    definitions = source.get("$defs", {})
    body = _structural(source, definitions)
    # The scale subresource reads it, so it must be there; other defaults are the spec's own.
    engine = body["properties"]["spec"]["properties"]["engine"]
    engine["default"] = {}
    engine["properties"]["replicas"]["default"] = 1
    # Kubernetes owns metadata and says itself what is valid there.
    body["properties"]["metadata"] = {"type": "object"}
    body["properties"]["status"] = status_schema()
    body["required"] = ["spec"]
    body["description"] = "One model, one pool of vLLM engines that share their KV caches, one endpoint."
    return body


def without_note(description: str) -> str:
    """A field's description without what is the same for all of its type; pages say that once."""
    return description.removesuffix(_QUANTITY_NOTE).removesuffix(_DURATION_NOTE).rstrip()


def _version() -> dict[str, Any]:
    return {
        "name": _VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.engine.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            _column("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
            _column("Replicas", "integer", ".status.replicas"),
            _column("Hit", "string", ".status.hit"),
            _column("Endpoint", "string", ".status.endpoint"),
            _column("Age", "date", ".metadata.creationTimestamp"),
            _column("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason') | {"priority": 1},
        ],
        "schema": {"openAPIV3Schema": schema()},
    }


def _column(name: str, kind: str, path: str) -> dict[str, str]:
    return {"name": name, "type": kind, "jsonPath": path}


def _structural(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    node = _resolved(node, definitions)
    kept = {key for key in node if key in _KEPT or key.startswith("x-kubernetes-")}
    # Copies, since YAML would write an object that occurs twice as an alias.
    result = {key: deepcopy(node[key]) for key in node if key in kept and node[key] is not None}
    if "const" in node:
        result["enum"] = [node["const"]]
    if "exclusiveMinimum" in node:
        result |= {"minimum": node["exclusiveMinimum"], "exclusiveMinimum": True}
    if result.get("x-kubernetes-int-or-string") and "pattern" in result:
        note = _DURATION_NOTE if "(ms|s|m|h|d)" in result["pattern"] else _QUANTITY_NOTE
        result["description"] = f"{result['description']} {note}"
    if result.get("type") == "object":
        result |= _object(node, definitions)
    if result.get("type") == "array":
        result["items"] = _structural(node["items"], definitions)
    if "type" not in result:
        result["x-kubernetes-int-or-string"] = True
    return result


def _object(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    properties = node.get("properties")
    if properties is not None:
        return {"properties": {name: _structural(item, definitions) for name, item in properties.items()}}
    values = node.get("additionalProperties")
    if isinstance(values, dict) and values:
        return {"additionalProperties": _structural(values, definitions)}
    return {_PRESERVE: True}


def _resolved(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """References and `| null` taken away; what the field itself says wins."""
    alternatives = [item for item in node.get("anyOf", []) if item.get("type") != "null"]
    inner = node.get("$ref") or None
    own = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
    if inner is not None:
        return _resolved(definitions[inner.rsplit("/", 1)[1]] | own, definitions)
    if len(alternatives) == 1:
        return _resolved(alternatives[0] | own, definitions)
    return own


def render() -> str:
    """The file's text."""
    header = "# Generated from the typed spec: python -m kvist_operator.crd > crds/cachecluster.yaml\n"
    return header + yaml.safe_dump(crd(), sort_keys=False, width=110)


if __name__ == "__main__":
    sys.stdout.write(render())
