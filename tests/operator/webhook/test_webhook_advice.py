"""What is warned of, what is refused, and in which words: the review of one object."""

from __future__ import annotations

from typing import Any

import pytest

from kvist_operator.render.kube import Context, Images
from kvist_operator.webhook.judge import LONGEST, ReviewError, Verdict, judge, review

CONTEXT = Context("", "", Images("engine", "router", "agent", "redis"))
GPUS = {"limits": {"nvidia.com/gpu": 4}}


def cluster(
    model: str = "owner/Model-8B",
    engine: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    return {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "CacheCluster",
        "metadata": {"name": "demo", "namespace": "team", "uid": "1", "managedFields": [], **metadata},
        "spec": {"model": {"name": model}, "engine": engine or {}, "cache": cache or {}},
    }


def reviewed(new: dict[str, Any], old: dict[str, Any] | None = None) -> dict[str, Any]:
    request = {"uid": "abc", "operation": "UPDATE" if old else "CREATE", "object": new, "oldObject": old}
    body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    answer = review(body, CONTEXT)
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response: dict[str, Any] = answer["response"]
    assert response["uid"] == "abc"
    return response


@pytest.mark.parametrize(
    ("model", "engine", "cache", "said"),
    [
        (
            "owner/Model-8B",
            {"maxModelLen": 32768},
            {"memory": "1Gi"},
            "spec.cache.memory: 1Gi: one prompt of 32768 tokens takes about 1.8 GiB or more; "
            "set at least 1792Mi, or less engine.maxModelLen",
        ),
        (
            "owner/Model-8B",
            {"maxModelLen": 32768, "kvCacheMemory": "1Gi"},
            {"memory": "4Gi"},
            "spec.engine.kvCacheMemory: 1Gi: one prompt of 32768 tokens takes 1.8 GiB; set at least 1792Mi",
        ),
        ("owner/Model-8B", {}, {"memory": "8Mi"}, "spec.cache.memory: 8Mi: one chunk of this model takes"),
        (
            "owner/Model-8B",
            {"tensorParallelSize": 4, "resources": GPUS},
            {
                "disk": {
                    "size": "9Gi",
                    "volumeClaimTemplate": {"resources": {"requests": {"storage": "10Gi"}}},
                }
            },
            "spec.cache.disk: 9Gi: reading back at 1 GB/s is slower than computing again",
        ),
        (
            "owner/Model-0.5B",
            {"resources": {"limits": {"nvidia.com/gpu": 1}}},
            {
                "disk": {
                    "size": "9Gi",
                    "volumeClaimTemplate": {"resources": {"requests": {"storage": "10Gi"}}},
                }
            },
            "spec.cache.disk: 9Gi: reading back",
        ),
        (
            "owner/Model-70B",
            {"dtype": "float32"},
            {"remote": {"redis": {"urls": ["redis://cache:6379"]}}},
            "spec.cache.remote.redis: given: a chunk, one value, takes about 60.0 MiB or more",
        ),
        (
            "owner/Model-32B",
            {"maxModelLen": 131072},
            {"memory": "20Gi", "remote": {"redis": {"managed": {"memory": "1Gi", "replicas": 2}}}},
            "spec.cache.remote.redis.managed.memory: 1Gi: one prompt of 131072 tokens takes about 7.5 GiB or "
            "more on each of 2; set at least 7680Mi, or more replicas",
        ),
    ],
)
def test_what_will_disappoint_is_warned_of_and_admitted(
    model: str, engine: dict[str, Any], cache: dict[str, Any], said: str
) -> None:
    response = reviewed(cluster(model, engine, cache))
    assert response["allowed"] is True
    assert [text for text in response["warnings"] if said in text], response["warnings"]
    assert max(map(len, response["warnings"])) <= LONGEST


@pytest.mark.parametrize(
    ("model", "engine", "cache"),
    [
        ("owner/Model-8B", {"maxModelLen": 32768}, {"memory": "8Gi"}),
        ("owner/Model-8B", {}, {"memory": "1Gi", "disk": {"size": "9Gi"}}),
        ("owner/Model-8B", {"maxModelLen": 32768}, {"enabled": False}),
        ("owner/Model-8B", {"maxModelLen": 32768}, {"memory": 0}),
        ("owner/Model-8B", {}, {"remote": {"redis": {"urls": ["redis://cache:6379"]}}}),
        ("owner/Model-70B", {"resources": GPUS, "tensorParallelSize": 4}, {"disk": {"size": "9Gi"}}),
        ("owner/Model-8x7B", {"maxModelLen": 131072}, {"memory": "16Mi"}),
        ("owner/Model-30B-A3B", {"maxModelLen": 131072}, {"memory": "16Mi"}),
        ("owner/nameless", {"maxModelLen": 131072}, {"memory": "16Mi"}),
        (
            "owner/Model-8B",
            {"maxModelLen": 32768, "extraArgs": ["--kv-cache-dtype=fp8"]},
            {"memory": "1Gi"},
        ),
    ],
)
def test_what_fits_or_cannot_be_known_is_admitted_without_a_word(
    model: str, engine: dict[str, Any], cache: dict[str, Any]
) -> None:
    assert reviewed(cluster(model, engine, cache)) == {"uid": "abc", "allowed": True}


def test_a_hub_that_pods_may_not_reach_is_warned_of() -> None:
    hub = [{"ipBlock": {"cidr": "0.0.0.0/0"}}]

    def warnings(**policy: Any) -> tuple[str, ...]:
        new = cluster("owner/model")
        new["spec"]["security"] = {"networkPolicy": policy}
        return judge(new, None, CONTEXT).warnings

    assert warnings(egress=True) == (
        "spec.security.networkPolicy.egress: true: pods cannot fetch owner/model from the hub; name the hub "
        "or a mirror in egressTo, or put the model into model.volume",
    )
    assert warnings() == warnings(egress=True, egressTo=hub) == ()
    assert warnings(egress=True, enabled=False) == ()


def test_what_cannot_be_carried_out_is_refused_with_field_value_and_remedy() -> None:
    twice = {"spec": {"volumes": [{"name": "a"}, {"name": "a"}]}}
    response = reviewed(cluster(engine={"podTemplate": twice}))
    assert response["allowed"] is False
    assert response["status"]["code"] == 422
    assert "spec.engine.podTemplate.spec.volumes: name 'a' is given twice" in response["status"]["message"]
    claim = {"disk": {"size": "9Gi", "volumeClaimTemplate": {"resources": {"requests": {"storage": "1Gi"}}}}}
    assert "set at least" in reviewed(cluster(cache=claim))["status"]["message"]


def test_clearing_at_deletion_what_is_not_there_is_refused_in_words() -> None:
    said = reviewed(cluster(cache={"remote": {"whenDeleted": "Clear"}}))["status"]["message"]
    assert said.startswith("spec.cache.remote.whenDeleted: Clear is not possible")
    assert "name one in spec.cache.remote" in said
    external = {"redis": {"urls": ["redis://cache:6379"]}, "whenDeleted": "Clear"}
    assert reviewed(cluster(cache={"remote": external}))["allowed"] is True
    assert reviewed(cluster(cache={"remote": {"whenDeleted": "Retain"}}))["allowed"] is True


def test_an_object_that_was_refused_before_may_be_changed_step_by_step() -> None:
    wrong = cluster(cache={"remote": {"whenDeleted": "Clear"}})
    response = reviewed({**wrong, "spec": {**wrong["spec"], "engine": {"replicas": 3}}}, old=wrong)
    assert response["allowed"] is True
    assert "whenDeleted" in response["warnings"][0]
    assert reviewed(wrong, old=cluster())["allowed"] is False


def test_an_object_under_deletion_or_with_the_same_spec_is_let_alone() -> None:
    wrong = cluster(cache={"remote": {"whenDeleted": "Clear"}})
    leaving = cluster(cache={"memory": "8Mi"}, deletionTimestamp="2026-01-01T00:00:00Z")
    assert judge(leaving, cluster(), CONTEXT) == Verdict()
    assert (
        judge({**wrong, "metadata": {**wrong["metadata"], "labels": {"a": "b"}}}, wrong, CONTEXT) == Verdict()
    )


def test_a_name_that_the_api_server_will_make_is_none_that_is_missing() -> None:
    found = cluster()
    del found["metadata"]["name"]
    found["metadata"]["generateName"] = "demo-"
    assert reviewed(found)["allowed"] is True


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview", "request": {}},
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "1"}},
    ],
)
def test_what_is_no_review_is_refused_in_words(body: Any) -> None:
    with pytest.raises(ReviewError, match=r"AdmissionReview|request\.uid"):
        review(body, CONTEXT)
