"""A user's podTemplate over the rendered one: the strategic merge that `kubectl patch` does."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.errors import ConfigError
from kvist_operator.render.merge import MERGE_KEYS, overlay

FIELD = "spec.engine.podTemplate"
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "containers": [
            {
                "name": "engine",
                "image": "i",
                "args": ["x"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "volumeMounts": [{"mountPath": "/tmp", "name": "tmp"}],
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "terminationGracePeriodSeconds": 30,
    },
}
NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
SCALARS = st.integers(0, 3) | st.sampled_from(["x", "y"]) | st.booleans()


def entry(name: str) -> st.SearchStrategy[dict[str, Any]]:
    fields = st.dictionaries(st.sampled_from(["image", "command", "workingDir"]), SCALARS, max_size=3)
    return fields.map(lambda rest: {"name": name, **rest})


CONTAINERS = st.lists(NAMES, unique=True, max_size=4).flatmap(
    lambda names: st.tuples(*[entry(name) for name in names]).map(list)
)
TEMPLATES = st.builds(
    lambda containers, rest: {"spec": {"containers": containers, **rest}},
    CONTAINERS,
    st.dictionaries(st.sampled_from(["hostname", "nodeName", "subdomain"]), SCALARS, max_size=3),
)


def laid_over(patch: dict[str, Any]) -> dict[str, Any]:
    return overlay(TEMPLATE, patch, FIELD)


@given(TEMPLATES)
def test_an_empty_overlay_changes_nothing(template: dict[str, Any]) -> None:
    assert overlay(template, {}, FIELD) == template


@given(TEMPLATES, TEMPLATES)
def test_an_overlay_is_there_afterwards_and_again_changes_nothing(
    template: dict[str, Any], patch: dict[str, Any]
) -> None:
    once = overlay(template, patch, FIELD)
    assert overlay(once, patch, FIELD) == once
    by_name = {item["name"]: item for item in once["spec"]["containers"]}
    for item in patch["spec"]["containers"]:
        assert item.items() <= by_name[item["name"]].items()


@given(TEMPLATES, TEMPLATES)
def test_what_the_overlay_does_not_name_stays_in_its_order(
    template: dict[str, Any], patch: dict[str, Any]
) -> None:
    before = deepcopy(template)
    merged = overlay(template, patch, FIELD)["spec"]["containers"]
    own = [item["name"] for item in template["spec"]["containers"]]
    assert [item["name"] for item in merged][: len(own)] == own
    patched = {item["name"] for item in patch["spec"]["containers"]}
    kept = [item for item in template["spec"]["containers"] if item["name"] not in patched]
    assert [item for item in merged if item["name"] not in patched] == kept
    assert template == before


@given(TEMPLATES, st.data())
def test_a_deleted_entry_is_gone_and_no_other(template: dict[str, Any], data: st.DataObject) -> None:
    gone = data.draw(NAMES)
    patch = {"spec": {"containers": [{"name": gone, "$patch": "delete"}]}}
    merged = overlay(template, patch, FIELD)["spec"]["containers"]
    assert merged == [item for item in template["spec"]["containers"] if item["name"] != gone]


def test_entries_are_merged_by_their_key_down_to_the_environment() -> None:
    env = [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]
    found = laid_over({"spec": {"containers": [{"name": "engine", "env": env}]}})["spec"]["containers"][0]
    assert found["env"] == [{"name": "A", "value": "1"}, *env]
    assert (found["image"], found["args"]) == ("i", ["x"])


def test_a_list_without_a_merge_key_is_replaced() -> None:
    found = laid_over({"spec": {"containers": [{"name": "engine", "args": ["y", "z"]}]}})
    assert found["spec"]["containers"][0]["args"] == ["y", "z"]


def test_null_takes_a_field_away() -> None:
    assert (
        "terminationGracePeriodSeconds"
        not in laid_over({"spec": {"terminationGracePeriodSeconds": None}})["spec"]
    )


def test_a_volume_of_another_kind_is_given_with_replace() -> None:
    host = {"name": "shm", "$patch": "replace", "ephemeral": {}}
    found = laid_over({"spec": {"volumes": [host]}})
    assert found["spec"]["volumes"] == [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "ephemeral": {}}]


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (
            {"spec": {"containers": [{"name": "engine"}, {"name": "engine"}]}},
            f"{FIELD}.spec.containers: name 'engine' is given twice",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "env": [{"name": "A"}, {"name": "A"}]}]}},
            f"{FIELD}.spec.containers[0].env: name 'A' is given twice",
        ),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "has no name, by which entries are merged"),
        ({"spec": {"$patch": "merge"}}, f"{FIELD}.spec.$patch: 'merge' is not valid"),
        ({"$patch": "delete"}, "the whole pod template cannot be deleted"),
    ],
)
def test_what_cannot_be_merged_is_named(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        laid_over(patch)
    assert message in str(refused.value)


def test_init_containers_merge_like_containers() -> None:
    own = {
        path.partition("ontainers")[2]: key
        for path, key in MERGE_KEYS.items()
        if path.startswith("spec.containers")
    }
    init = {
        path.partition("ontainers")[2]: key
        for path, key in MERGE_KEYS.items()
        if path.startswith("spec.initC")
    }
    assert own == init
