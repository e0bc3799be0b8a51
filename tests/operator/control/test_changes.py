"""What is written and what is left alone: hashes, drift, and fields of others."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvist_operator.control.changes import (
    HASH_ANNOTATION,
    Left,
    contained,
    decide,
    digest,
    finished,
    key_of,
    rendered_hash,
)

OWNER = {"apiVersion": "kvist.dev/v1alpha1", "kind": "CacheCluster", "name": "demo", "uid": "u1"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def service(**body: Any) -> dict[str, Any]:
    metadata = {"name": "x", "labels": {"a": "b"}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [1], **body}}


def done(obj: dict[str, Any]) -> dict[str, Any]:
    (result,) = finished([obj], "team", OWNER)
    return result


def live(obj: dict[str, Any]) -> dict[str, Any]:
    """As the API server holds it: with defaults and system fields."""
    result = copy.deepcopy(obj)
    result["metadata"] |= {"uid": "x", "resourceVersion": "7", "generation": 1}
    result["spec"]["clusterIP"] = "10.0.0.1"
    result["status"] = {"loadBalancer": {}}
    return result


def test_what_is_applied_has_namespace_owner_and_hash() -> None:
    obj = done(service())
    assert obj["metadata"]["namespace"] == "team"
    assert obj["metadata"]["ownerReferences"] == [OWNER]
    assert obj["metadata"]["annotations"][HASH_ANNOTATION] == rendered_hash(obj)
    assert rendered_hash(obj) != rendered_hash(done(service(type="NodePort")))


def test_rendering_order_does_not_matter() -> None:
    one, two = service(), {**service(), "kind": "ConfigMap"}
    assert finished([one, two], "t", OWNER) == finished([two, one], "t", OWNER)


def test_a_missing_object_and_a_new_rendering_are_applied() -> None:
    obj = done(service())
    assert decide([obj], {}, {}, "u1").apply == (obj,)
    old = live(done(service(type="NodePort")))
    assert decide([obj], {key_of(obj): old}, {}, "u1").apply == (obj,)


def test_defaults_status_and_foreign_fields_are_no_change() -> None:
    obj = done(service())
    changes = decide([obj], {key_of(obj): live(obj)}, {}, "u1")
    assert changes.empty
    assert changes.unchanged == (key_of(obj),)


def test_a_changed_or_missing_field_of_ours_is_applied() -> None:
    obj = done(service())
    for edit in (lambda o: o["spec"].pop("ports"), lambda o: o["spec"]["ports"].append(2)):
        drifted = live(obj)
        edit(drifted)
        assert decide([obj], {key_of(obj): drifted}, {}, "u1").apply == (obj,)


def test_a_value_that_the_server_spells_otherwise_is_applied_once_only() -> None:
    obj = done(service(size="1024Mi"))
    normalised = live(obj)
    normalised["spec"]["size"] = "1Gi"
    found = {key_of(obj): normalised}
    assert decide([obj], found, {}, "u1").apply == (obj,)
    left = {key_of(obj): Left(rendered_hash(obj), digest(normalised))}
    assert decide([obj], found, left, "u1").empty
    normalised["spec"]["size"] = "2Gi"
    assert decide([obj], found, left, "u1").apply == (obj,)


def test_only_our_own_are_pruned() -> None:
    ours, others, going = (live(done({**service(), "metadata": {"name": name}})) for name in "abc")
    others["metadata"]["ownerReferences"] = [{**OWNER, "uid": "u2"}]
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    found = {key_of(obj): obj for obj in (ours, others, going)}
    assert decide([], found, {}, "u1").prune == (ours,)


@given(JSON)
def test_everything_contains_itself(value: Any) -> None:
    assert contained(value, copy.deepcopy(value))


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), st.text(min_size=4, max_size=6), JSON)
def test_more_keys_are_contained_and_fewer_are_not(value: dict[str, Any], key: str, extra: Any) -> None:
    assert contained(value, {**value, key: extra})
    assert not contained({**value, key: extra}, value)
