"""What only Kvist may fill in is refused in every text of a spec, and no podTemplate breaks the rendering."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from kvist_connector.errors import ConfigError
from kvist_operator.control.secret_values import MARK_ANNOTATION, mark_pods
from kvist_operator.spec import Spec
from kvist_operator.testing import cluster, rendered

TEXTS = [start + "$(host)" for start in ("", "redis://", "s3://", "https://", "a/")]


def sections(kind: Any) -> Iterator[type[BaseModel]]:
    """Sections that a type names, however deep in lists and alternatives."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in get_args(kind):
        yield from sections(inner)


def takers(section: type[BaseModel], path: str) -> Iterator[str]:
    """Fields that accept a placeholder, as a text or in a list of texts."""
    for name, field in section.model_fields.items():
        adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
        if any(accepted(adapter, value) for text in TEXTS for value in (text, [text])):
            yield f"{path}.{name}"
        for inner in sections(field.annotation):
            yield from takers(inner, f"{path}.{name}")


def accepted(adapter: TypeAdapter[Any], value: object) -> bool:
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def test_no_field_takes_a_placeholder() -> None:
    assert list(takers(Spec, "spec")) == []


def test_the_revision_of_an_adapter_is_refused_by_name() -> None:
    adapter = {"name": "sql", "path": "a/b", "revision": "$(engine)"}
    with pytest.raises(ConfigError, match=r"loraAdapters.0.revision.* it holds \$\(engine\)"):
        cluster(model={"name": "owner/model", "loraAdapters": [adapter]})


VALUES = st.none() | st.integers(0, 2) | st.sampled_from(["", "engine", "replace", "delete"])
FIELDS = st.sampled_from(
    ["$patch", "metadata", "annotations", "labels", "spec", "containers", "volumes", "env", "name"]
)
TEMPLATES = st.dictionaries(
    FIELDS,
    st.recursive(
        VALUES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(FIELDS, inner, max_size=3)
    ),
    max_size=3,
)


@given(TEMPLATES)
def test_any_pod_template_is_rendered_and_marked_or_refused_in_words(template: dict[str, Any]) -> None:
    said = ""
    try:
        mark_pods(rendered(cluster(engine={"podTemplate": template})).values(), {"engine": "abcd"})
    except ConfigError as error:
        said = str(error)
    assert not said or said.startswith("spec.engine.podTemplate")


@pytest.mark.parametrize("metadata", [None, {"annotations": None}, {"labels": {"a": "b"}}])
def test_pods_are_marked_whatever_the_template_takes_away(metadata: Any) -> None:
    objects = rendered(cluster(engine={"podTemplate": {"metadata": metadata}}))
    marked = {item["kind"]: item for item in mark_pods(objects.values(), {"engine": "abcd"})}
    assert marked["StatefulSet"]["spec"]["template"]["metadata"]["annotations"][MARK_ANNOTATION] == "abcd"


@pytest.mark.parametrize("wrong", [5, [], {"annotations": "x"}, {"labels": ["a"]}])
def test_a_pod_template_of_another_shape_is_refused_by_its_field(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"spec\.engine\.podTemplate\.metadata.* is no mapping; give one"):
        rendered(cluster(engine={"podTemplate": {"metadata": wrong}}))
