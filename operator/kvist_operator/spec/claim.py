"""The schema of a PersistentVolumeClaim's spec, as far as the API server has to compare two of them.

CEL compares fields that a schema names; of others it sees only how many there are. Used by cache.py.
"""

from __future__ import annotations

from typing import Any, Final

_Schema = dict[str, Any]


def _text(description: str) -> _Schema:
    return {"type": "string", "description": description, "maxLength": 253}


def _texts(description: str) -> _Schema:
    items = {"type": "string", "maxLength": 253}
    return {"type": "array", "description": description, "items": items, "maxItems": 32}


def _map(description: str, values: _Schema) -> _Schema:
    return {"type": "object", "description": description, "additionalProperties": values, "maxProperties": 32}


def _object(description: str, **properties: _Schema) -> _Schema:
    return {"type": "object", "description": description, "properties": properties}


_AMOUNT: Final = {"x-kubernetes-int-or-string": True, "maxLength": 64}
_SOURCE: Final = {
    "apiGroup": _text("API group of the source. Default: none."),
    "kind": _text("Kind of the source. Default: none."),
    "name": _text("Name of the source. Default: none."),
}
_EXPRESSION: Final = _object(
    "A condition on one label. Default: none.",
    key=_text("Label. Default: none."),
    operator=_text("In, NotIn, Exists or DoesNotExist. Default: none."),
    values=_texts("Values of the label. Default: none."),
)
CLAIM_SCHEMA: Final[_Schema] = {
    "type": "object",
    "properties": {
        "accessModes": _texts("Access modes. Default: ReadWriteOnce."),
        "dataSource": _object("What the volume is filled from. Default: nothing.", **_SOURCE),
        "dataSourceRef": _object(
            "What the volume is filled from, of any kind. Default: nothing.",
            **_SOURCE,
            namespace=_text("Namespace of the source. Default: none."),
        ),
        "resources": _object(
            "Size of the volume.",
            requests=_map("At least, by name: storage. Default: none.", _AMOUNT),
            limits=_map("At most, by name: storage. Default: none.", _AMOUNT),
        ),
        "selector": _object(
            "Which volumes may be bound. Default: any.",
            matchLabels=_map("Labels of the volume. Default: none.", {"type": "string", "maxLength": 63}),
            matchExpressions={
                "type": "array",
                "description": "Conditions on labels. Default: none.",
                "items": _EXPRESSION,
                "maxItems": 32,
            },
        ),
        "storageClassName": _text("Storage class. Default: the cluster's."),
        "volumeAttributesClassName": _text("Volume attributes class. Default: none."),
        "volumeMode": _text("Filesystem. Default: Filesystem."),
        "volumeName": _text("The one volume to bind. Default: any."),
    },
}
