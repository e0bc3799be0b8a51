"""One suite over every `Api`: the fake, and a real server when KUBECONFIG names one (`make e2e-up`)."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvist_operator.control.api import Api
from kvist_operator.control.errors import Conflict, Invalid, NotFound
from kvist_operator.control.login import login
from kvist_operator.control.resources import (
    CLUSTERS,
    EVENTS,
    LEASES,
    OPTIONAL_GROUP,
    PODS,
    SECRETS,
    STATEFUL_SETS,
    Object,
    Resource,
)
from kvist_operator.control.rest import RestApi
from kvist_operator.control.testing.fake_api import FakeApi
from kvist_operator.crd import crd
from kvist_operator.render.kube import MANAGER

CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition")


class Bed:
    """A client and a namespace of its own."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    def make(self, resource: Resource, name: str, **body: Any) -> Object:
        meta = {"name": name, "namespace": self.namespace, **body.pop("metadata", {})}
        return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta, **body}


@pytest.fixture(params=["fake", "real"])
async def bed(request: pytest.FixtureRequest) -> AsyncIterator[Bed]:
    if request.param == "fake":
        yield Bed(FakeApi(optional=()), "default")
        return
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no API server; make e2e-up starts one")
    async with RestApi(login) as api:
        if CLUSTERS.kind not in await api.kinds(CLUSTERS):
            await api.raw("POST", CRDS.path(None), crd())
        namespace = f"kvist-test-{uuid.uuid4().hex[:8]}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        await api.raw("POST", NAMESPACES.path(None), body)
        try:
            yield Bed(api, namespace)
        finally:
            await api.raw("DELETE", NAMESPACES.path(None, namespace))


def pod(bed: Bed, name: str) -> Object:
    container = {"name": "engine", "image": "none"}
    return bed.make(PODS, name, spec={"containers": [container]})


def stateful_set(bed: Bed, replicas: int = 1, **container: Any) -> Object:
    labels = {"app": "x"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "engine", "image": "none", **container}]},
    }
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": labels},
        "serviceName": "x",
        "updateStrategy": {"type": "OnDelete"},
        "template": template,
    }
    return bed.make(STATEFUL_SETS, "engines", spec=spec)


async def test_what_is_not_there_is_none_and_an_unknown_kind_is_not_found(bed: Bed) -> None:
    assert await bed.api.get(CONFIG_MAPS, bed.namespace, "absent") is None
    assert await bed.api.get(OPTIONAL_GROUP, bed.namespace, "absent") is None
    with pytest.raises(NotFound):
        await bed.api.list(OPTIONAL_GROUP, bed.namespace)
    assert await bed.api.kinds(OPTIONAL_GROUP) == frozenset()
    assert "StatefulSet" in await bed.api.kinds(STATEFUL_SETS)


async def test_lists_hold_whole_objects_with_the_labels(bed: Bed) -> None:
    for name, color in (("a", "red"), ("b", "blue")):
        await bed.api.apply(CONFIG_MAPS, bed.make(CONFIG_MAPS, name, metadata={"labels": {"color": color}}))
    found = await bed.api.list(CONFIG_MAPS, bed.namespace, {"color": "red"})
    assert [(o["kind"], o["apiVersion"], o["metadata"]["name"]) for o in found] == [("ConfigMap", "v1", "a")]
    named = await bed.api.list(CONFIG_MAPS, bed.namespace, fields={"metadata.name": "b"})
    assert [obj["metadata"]["name"] for obj in named] == ["b"]
    everywhere = await bed.api.list(CONFIG_MAPS, None, {"color": "blue"})
    assert "b" in {obj["metadata"]["name"] for obj in everywhere}


async def test_applying_the_same_twice_changes_nothing(bed: Bed) -> None:
    obj = bed.make(CONFIG_MAPS, "same", data={"key": "value"})
    first = await bed.api.apply(CONFIG_MAPS, obj)
    again = await bed.api.apply(CONFIG_MAPS, obj)
    assert first["metadata"]["resourceVersion"] == again["metadata"]["resourceVersion"]


async def test_a_field_that_is_no_longer_applied_goes_and_those_of_others_stay(bed: Bed) -> None:
    await bed.api.apply(CONFIG_MAPS, bed.make(CONFIG_MAPS, "shared", data={"ours": "1", "old": "1"}))
    await bed.api.patch(CONFIG_MAPS, bed.namespace, "shared", {"data": {"theirs": "2"}})
    applied = await bed.api.apply(CONFIG_MAPS, bed.make(CONFIG_MAPS, "shared", data={"ours": "3"}))
    assert applied["data"] == {"ours": "3", "theirs": "2"}


async def test_a_field_that_somebody_else_set_too_stays_when_it_is_no_longer_applied(bed: Bed) -> None:
    await bed.api.apply(STATEFUL_SETS, stateful_set(bed))
    await bed.api.patch(STATEFUL_SETS, bed.namespace, "engines", {"spec": {"replicas": 3}})
    without = stateful_set(bed)
    del without["spec"]["replicas"]
    assert (await bed.api.apply(STATEFUL_SETS, without))["spec"]["replicas"] == 3


async def test_apply_takes_back_what_somebody_changed(bed: Bed) -> None:
    obj = bed.make(CONFIG_MAPS, "drift", data={"key": "ours"})
    live = await bed.api.apply(CONFIG_MAPS, obj)
    await bed.api.replace(CONFIG_MAPS, {**live, "data": {"key": "theirs"}})
    assert (await bed.api.apply(CONFIG_MAPS, obj))["data"] == {"key": "ours"}


async def test_a_generation_counts_changes_of_the_spec_only(bed: Bed) -> None:
    first = await bed.api.apply(STATEFUL_SETS, stateful_set(bed))
    labelled = stateful_set(bed)
    labelled["metadata"]["labels"] = {"new": "label"}
    assert (await bed.api.apply(STATEFUL_SETS, labelled))["metadata"]["generation"] == 1
    changed = await bed.api.apply(STATEFUL_SETS, stateful_set(bed, replicas=0))
    assert (first["metadata"]["generation"], changed["metadata"]["generation"]) == (1, 2)


async def test_a_container_that_is_no_longer_applied_goes(bed: Bed) -> None:
    two = stateful_set(bed)
    two["spec"]["template"]["spec"]["containers"].append({"name": "more", "image": "none"})
    await bed.api.apply(STATEFUL_SETS, two)
    one = await bed.api.apply(STATEFUL_SETS, stateful_set(bed, command=["x"]))
    containers = one["spec"]["template"]["spec"]["containers"]
    assert [(item["name"], item["command"]) for item in containers] == [("engine", ["x"])]


async def test_a_dry_run_changes_nothing(bed: Bed) -> None:
    await bed.api.apply(CONFIG_MAPS, bed.make(CONFIG_MAPS, "dry", data={"key": "old"}))
    await bed.api.apply(CONFIG_MAPS, bed.make(CONFIG_MAPS, "dry", data={"key": "new"}), dry_run=True)
    live = await bed.api.get(CONFIG_MAPS, bed.namespace, "dry")
    assert live is not None
    assert live["data"] == {"key": "old"}


async def test_only_the_object_with_that_uid_is_applied_to(bed: Bed) -> None:
    live = await bed.api.apply(CONFIG_MAPS, bed.make(CONFIG_MAPS, "one"))
    other = bed.make(CONFIG_MAPS, "one", metadata={"uid": "00000000-0000-0000-0000-000000000000"})
    with pytest.raises(Conflict):
        await bed.api.apply(CONFIG_MAPS, other)
    same = bed.make(CONFIG_MAPS, "one", metadata={"uid": live["metadata"]["uid"]})
    assert (await bed.api.apply(CONFIG_MAPS, same))["metadata"]["uid"] == live["metadata"]["uid"]


async def test_creating_a_taken_name_and_replacing_an_old_version_conflict(bed: Bed) -> None:
    lease = bed.make(LEASES, "lease", spec={"holderIdentity": "a"})
    first = await bed.api.create(LEASES, lease)
    with pytest.raises(Conflict):
        await bed.api.create(LEASES, lease)
    await bed.api.replace(LEASES, {**first, "spec": {"holderIdentity": "b"}})
    with pytest.raises(Conflict):
        await bed.api.replace(LEASES, {**first, "spec": {"holderIdentity": "c"}})
    with pytest.raises(NotFound):
        await bed.api.replace(CONFIG_MAPS, bed.make(CONFIG_MAPS, "absent"))


async def test_an_object_that_says_nonsense_is_invalid(bed: Bed) -> None:
    if isinstance(bed.api, FakeApi):
        bed.api.reject = lambda obj: "spec.replicas: must not be negative"
    with pytest.raises(Invalid, match=r"spec\.replicas"):
        await bed.api.apply(STATEFUL_SETS, stateful_set(bed, replicas=-1))
    assert await bed.api.get(STATEFUL_SETS, bed.namespace, "engines") is None


@pytest.mark.parametrize("mistake", [{"nodeSelectr": {"a": "b"}}, {"nodeSelector": ["a"]}, {"volumes": "x"}])
async def test_a_field_that_the_kind_does_not_have_is_invalid(bed: Bed, mistake: dict[str, Any]) -> None:
    (name,) = mistake
    if isinstance(bed.api, FakeApi):
        bed.api.reject = lambda obj: f".spec.template.spec.{name}: field not declared in schema"
    wrong = stateful_set(bed, replicas=1)
    wrong["spec"]["template"]["spec"] |= mistake
    with pytest.raises(Invalid, match=name):
        await bed.api.apply(STATEFUL_SETS, wrong, dry_run=True)


async def test_deleting_is_for_one_uid_and_twice_is_harmless(bed: Bed) -> None:
    live = await bed.api.apply(CONFIG_MAPS, bed.make(CONFIG_MAPS, "gone"))
    with pytest.raises(Conflict):
        await bed.api.delete(CONFIG_MAPS, {**live, "metadata": {**live["metadata"], "uid": "other"}})
    assert await bed.api.delete(CONFIG_MAPS, live)
    assert not await bed.api.delete(CONFIG_MAPS, live)


async def test_a_condition_of_a_pod_is_patched_and_the_others_stay(bed: Bed) -> None:
    await bed.api.create(PODS, pod(bed, "gated"))
    for kind, status in (("kvist.dev/a", "True"), ("kvist.dev/b", "True"), ("kvist.dev/a", "False")):
        patch = {"status": {"conditions": [{"type": kind, "status": status}]}}
        live = await bed.api.patch(PODS, bed.namespace, "gated", patch, subresource="status")
    ours = {c["type"]: c["status"] for c in live["status"]["conditions"] if "kvist.dev" in c["type"]}
    assert ours == {"kvist.dev/a": "False", "kvist.dev/b": "True"}
    wrong = {"metadata": {"uid": "00000000-0000-0000-0000-000000000000"}, **patch}
    with pytest.raises(Conflict):
        await bed.api.patch(PODS, bed.namespace, "gated", wrong, subresource="status")
    with pytest.raises(NotFound):
        await bed.api.patch(PODS, bed.namespace, "absent", patch, subresource="status")


async def test_evicting_takes_that_very_pod_away(bed: Bed) -> None:
    live = await bed.api.create(PODS, pod(bed, "evicted"))
    assert await bed.api.evict(live)
    after = await bed.api.get(PODS, bed.namespace, "evicted")
    assert after is None or "deletionTimestamp" in after["metadata"]  # where a kubelet ends it first
    absent = {"name": "absent", "namespace": bed.namespace, "uid": live["metadata"]["uid"]}
    assert not await bed.api.evict({"metadata": absent})


async def test_status_is_applied_without_touching_the_spec(bed: Bed) -> None:
    cluster = bed.make(CLUSTERS, "demo", spec={"model": {"name": "org/model"}})
    made = await bed.api.create(CLUSTERS, cluster)
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Serving",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {"conditions": [condition], "hit": "50%", "engines": [{"name": "a"}, {"name": "b"}]}
    metadata = {"uid": made["metadata"]["uid"]}
    await bed.api.apply(
        CLUSTERS, bed.make(CLUSTERS, "demo", metadata=metadata, status=status), subresource="status"
    )
    status = {"conditions": [condition], "engines": [{"name": "b"}]}
    live = await bed.api.apply(
        CLUSTERS, bed.make(CLUSTERS, "demo", metadata=metadata, status=status), subresource="status"
    )
    assert live["status"] == status
    assert live["metadata"]["generation"] == made["metadata"]["generation"]
    with pytest.raises(NotFound):
        await bed.api.apply(CLUSTERS, bed.make(CLUSTERS, "absent", status=status), subresource="status")


async def test_an_event_is_created_once_and_continued(bed: Bed) -> None:
    event = bed.make(
        EVENTS,
        "demo.1",
        involvedObject={"kind": "CacheCluster", "name": "demo", "namespace": bed.namespace},
        reason="Scaled",
        message="1 to 2 engines",
        type="Normal",
        count=1,
        firstTimestamp="2026-01-01T00:00:00Z",
        lastTimestamp="2026-01-01T00:00:00Z",
        source={"component": MANAGER},
    )
    await bed.api.create(EVENTS, event)
    live = await bed.api.patch(EVENTS, bed.namespace, "demo.1", {"count": 2})
    assert live["count"] == 2


async def test_a_finalizer_holds_a_deleted_object_until_it_is_patched_away(bed: Bed) -> None:
    name = "kvist.dev/held"
    made = await bed.api.create(CLUSTERS, bed.make(CLUSTERS, "demo", spec={"model": {"name": "org/model"}}))
    meta = {"uid": made["metadata"]["uid"], "resourceVersion": made["metadata"]["resourceVersion"]}
    held = await bed.api.patch(CLUSTERS, bed.namespace, "demo", {"metadata": {**meta, "finalizers": [name]}})
    assert held["metadata"]["finalizers"] == [name]
    with pytest.raises(Conflict):  # not that version any more
        await bed.api.patch(CLUSTERS, bed.namespace, "demo", {"metadata": {**meta, "finalizers": None}})
    assert await bed.api.delete(CLUSTERS, held)
    going = await bed.api.get(CLUSTERS, bed.namespace, "demo")
    assert going is not None
    assert going["metadata"]["deletionTimestamp"]
    await bed.api.patch(CLUSTERS, bed.namespace, "demo", {"metadata": {"finalizers": None}})
    assert await bed.api.get(CLUSTERS, bed.namespace, "demo") is None


async def test_a_secrets_texts_come_back_encoded(bed: Bed) -> None:
    made = await bed.api.create(SECRETS, bed.make(SECRETS, "s", type="Opaque", stringData={"token": "abc"}))
    assert made["data"] == {"token": "YWJj"}
    assert "stringData" not in made


async def test_the_scale_of_a_program_is_patched_alone(bed: Bed) -> None:
    made = await bed.api.apply(STATEFUL_SETS, stateful_set(bed, 2))
    name, patch = made["metadata"]["name"], {"spec": {"replicas": 0}}
    await bed.api.patch(STATEFUL_SETS, bed.namespace, name, patch, subresource="scale")
    live = await bed.api.get(STATEFUL_SETS, bed.namespace, name)
    assert live is not None
    assert live["spec"]["replicas"] == 0
    assert live["spec"]["template"] == made["spec"]["template"]
