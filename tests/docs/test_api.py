"""docs/api.md is what the CustomResourceDefinition says now, and that says everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvist_operator.crd import crd
from tools import api_reference

SCHEMA: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for part in ("items", "additionalProperties"):
        if isinstance(node.get(part), dict):
            yield from nodes(node[part], f"{path}.{part}")


NODES = dict(nodes(SCHEMA, ""))


def test_the_page_is_current() -> None:
    assert api_reference.PAGE.read_text() == api_reference.page(), "run `python -m tools.api_reference`"


@pytest.mark.parametrize(
    "part",
    [
        "`engine.podTemplate`",
        "`autoscaling.maxReplicas`",
        "give exactly one of managed and urls",
        "`spec.volumes`",
    ],
)
def test_the_page_covers_each_kind_of_entry(part: str) -> None:
    assert part in api_reference.page()


def test_every_field_below_spec_and_status_is_described() -> None:
    bare = [
        path
        for path, node in NODES.items()
        if path.startswith((".spec", ".status")) and not path.endswith(("items", "additionalProperties"))
        if not node.get("description")
    ]
    assert bare == []


def test_optional_fields_of_the_spec_say_their_default() -> None:
    silent = []
    for path, node in NODES.items():
        optional = set(node.get("properties", {})) - set(node.get("required", ()))
        for name in optional if path.startswith(".spec") else ():
            inner = node["properties"][name]
            group = inner.get("type") == "object" and "properties" in inner
            if not group and "efault" not in inner["description"]:
                silent.append(f"{path}.{name}")
    assert silent == []


def test_every_text_list_and_mapping_has_a_bound() -> None:
    unbounded = []
    for path, node in NODES.items():
        kind = node.get("type")
        if kind == "string" and "enum" not in node and "maxLength" not in node:
            unbounded.append(path)
        if kind == "array" and "maxItems" not in node:
            unbounded.append(path)
        if kind == "object" and "additionalProperties" in node and "maxProperties" not in node:
            unbounded.append(path)
    assert unbounded == []
