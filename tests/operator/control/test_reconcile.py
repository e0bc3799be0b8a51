"""A cluster's life on the fake API server, seen through objects, status and events."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from kvist_operator.control.errors import Forbidden, Unavailable
from kvist_operator.control.reconcile import SECRETS_SECONDS
from kvist_operator.control.resources import CLUSTERS, DEPLOYMENTS, PODS, SECRETS, STATEFUL_SETS, Resource
from kvist_operator.control.views import Figures
from kvist_operator.render.kube import READINESS_GATE

World = Any
NAMESPACE = "team"
SERVICES = Resource("", "v1", "services", "Service")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")


def names(world: World, resource: Resource) -> list[str]:
    return [obj["metadata"]["name"] for obj in world.server.all(resource)]


async def test_an_applied_cluster_becomes_ready(world: World) -> None:
    world.apply(engine={"replicas": 2})
    await world.settle()
    assert world.says("Ready") == ("True", "Serving")
    assert world.says("EnginesReady") == ("True", "AllReady")
    assert world.says("RouterReady") == ("True", "AllReady")
    assert world.says("BackendReady") == ("True", "NotConfigured")
    assert world.says("CacheAware") == ("True", "Mirroring")
    assert world.says("Progressing") == ("False", "Settled")
    assert world.says("Degraded") == ("False", "AsExpected")
    status = world.status()
    assert (status["replicas"], status["readyReplicas"], status["observedGeneration"]) == (2, 2, 1)
    assert status["endpoint"] == "http://demo-router.team.svc:8080"
    assert [item["name"] for item in status["engines"] if item["mirrored"]] == [
        "demo-engine-0",
        "demo-engine-1",
    ]
    assert world.events() == ["Serving"]


async def test_nothing_is_written_while_nothing_changes(world: World) -> None:
    world.apply(engine={"replicas": 2})
    await world.settle()
    before = world.api.writes()
    for _ in range(20):
        world.clock.seconds += 60
        outcome = await world.turn()
        world.controllers()
    assert world.api.writes() == before
    assert outcome.again is None


async def test_an_operator_that_starts_anew_writes_nothing_either(world: World) -> None:
    world.apply(engine={"replicas": 2})
    await world.settle()
    before = world.api.writes()
    world.reconciler.known.clear()
    await world.settle()
    assert world.api.writes() == before


async def test_children_are_owned_labelled_and_of_the_managed_kinds(world: World) -> None:
    made = world.apply()
    await world.settle()
    for resource in (STATEFUL_SETS, DEPLOYMENTS, SERVICES, CONFIG_MAPS):
        for obj in world.server.all(resource):
            (owner,) = obj["metadata"]["ownerReferences"]
            assert (owner["uid"], owner["controller"]) == (made["metadata"]["uid"], True)
            assert obj["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "kvist-operator"
    world.server.remove(CLUSTERS, NAMESPACE, "demo")
    assert names(world, STATEFUL_SETS) == names(world, SECRETS) == names(world, PODS) == []
    assert (await world.turn()).gone


@pytest.mark.parametrize("change", ["spec", "labels", "gone"])
async def test_a_child_that_was_changed_by_hand_is_set_back(world: World, change: str) -> None:
    world.apply()
    await world.settle()
    before = world.child(DEPLOYMENTS, "demo-router")
    if change == "gone":
        world.server.remove(DEPLOYMENTS, NAMESPACE, "demo-router")
    else:
        edited = world.child(DEPLOYMENTS, "demo-router")
        if change == "spec":
            edited["spec"]["template"]["spec"]["containers"][0]["image"] = "other:1"
        else:
            edited["metadata"]["labels"]["app.kubernetes.io/component"] = "other"
        world.server.put(DEPLOYMENTS, edited)
    await world.settle()
    after = world.child(DEPLOYMENTS, "demo-router")
    assert after["spec"] == before["spec"]
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    assert ("Repaired" in world.events()) == (change != "gone")


async def test_a_child_without_its_labels_is_found_and_repaired(world: World) -> None:
    world.apply()
    await world.settle()
    edited = world.child(SERVICES, "demo-router")
    edited["metadata"]["labels"] = {}
    world.server.put(SERVICES, edited)
    await world.settle()
    labels = world.child(SERVICES, "demo-router")["metadata"]["labels"]
    assert labels["app.kubernetes.io/managed-by"] == "kvist-operator"


async def test_fields_that_others_own_are_left_to_them(world: World) -> None:
    world.apply()
    await world.settle()
    edited = world.child(SERVICES, "demo-router")
    edited["metadata"]["annotations"]["other"] = "kept"
    edited["spec"]["externalIPs"] = ["192.0.2.1"]
    world.server.put(SERVICES, edited)
    before = world.api.writes()
    await world.settle()
    assert world.api.writes() == before
    assert world.child(SERVICES, "demo-router")["spec"]["externalIPs"] == ["192.0.2.1"]


async def test_what_is_no_longer_rendered_goes_but_claims_stay(world: World) -> None:
    made = world.apply(cache={"remote": {"redis": {"managed": {}}}})
    await world.settle()
    assert "demo-redis" in names(world, STATEFUL_SETS)
    owner = {"uid": made["metadata"]["uid"]}
    labels = {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/managed-by": "kvist-operator"}
    metadata = {"name": "data", "namespace": NAMESPACE, "labels": labels, "ownerReferences": [owner]}
    world.server.put(CLAIMS, {"metadata": metadata})
    world.apply(cache={})
    await world.settle()
    assert "demo-redis" not in names(world, STATEFUL_SETS)
    assert "Pruned" in world.events()
    assert names(world, CLAIMS) == ["data"]


async def test_a_spec_that_is_wrong_is_told_and_what_runs_stays(world: World) -> None:
    world.apply(engine={"replicas": 2})
    await world.settle()
    before = world.child(STATEFUL_SETS, "demo-engine")
    world.apply(engine={"replicas": 2, "dtype": "int3"})
    await world.turn()
    assert world.says("Degraded") == ("True", "InvalidSpec")
    assert world.says("Ready") == ("False", "InvalidSpec")
    message = {c["type"]: c["message"] for c in world.status()["conditions"]}["Degraded"]
    assert "spec.engine.dtype" in message
    assert "int3" in message
    assert world.status()["observedGeneration"] == 2
    assert world.child(STATEFUL_SETS, "demo-engine") == before
    assert "InvalidSpec" in world.events()
    world.apply(engine={"replicas": 2})
    await world.settle()
    assert world.says("Ready") == ("True", "Serving")
    assert world.says("Degraded") == ("False", "AsExpected")
    assert world.events()[-1] == "AsExpected"


async def test_a_template_that_the_api_server_refuses_changes_nothing_at_all(world: World) -> None:
    world.apply()
    await world.settle()
    before = world.child(CONFIG_MAPS, "demo-router")
    world.server.reject = lambda obj: "spec.template: no" if obj["kind"] == "StatefulSet" else None
    world.apply(router={"policy": "round-robin"}, engine={"podTemplate": {"spec": {"nodeName": "x"}}})
    await world.turn()
    assert world.says("Degraded") == ("True", "Refused")
    assert world.child(CONFIG_MAPS, "demo-router") == before


async def test_somebody_elses_object_of_the_same_name_is_not_touched(world: World) -> None:
    taken = {"metadata": {"name": "demo-router", "namespace": NAMESPACE}, "spec": {"selector": {"a": "b"}}}
    stored = world.server.put(SERVICES, taken)
    world.apply()
    await world.turn()
    assert world.says("Degraded") == ("True", "NameTaken")
    assert world.child(SERVICES, "demo-router") == stored
    assert names(world, STATEFUL_SETS) == []


async def test_orphans_of_a_deleted_cluster_are_taken_in_again(world: World) -> None:
    world.apply()
    await world.settle()
    engines = world.child(STATEFUL_SETS, "demo-engine")
    engines["metadata"]["ownerReferences"] = []
    world.server.put(STATEFUL_SETS, engines)
    await world.settle()
    assert len(world.child(STATEFUL_SETS, "demo-engine")["metadata"]["ownerReferences"]) == 1


async def test_a_missing_right_is_told(world: World) -> None:
    world.apply()
    world.server.fail = [Forbidden("serviceaccounts is forbidden", 403)]
    await world.turn()
    assert world.says("Degraded") == ("True", "Forbidden")


async def test_a_server_that_fails_is_the_callers_to_retry(world: World) -> None:
    world.apply()
    world.server.fail = [Unavailable("down")]
    with pytest.raises(Unavailable):
        await world.turn()
    await world.settle()
    assert world.says("Ready") == ("True", "Serving")


async def test_a_secret_that_is_missing_is_named(world: World) -> None:
    world.apply(security={"token": {"name": "keys", "key": "list"}})
    for _ in range(5):
        await world.turn()
        world.controllers()
    assert world.says("Degraded") == ("True", "SecretMissing")
    message = {c["type"]: c["message"] for c in world.status()["conditions"]}["Degraded"]
    assert "Secret keys does not exist" in message
    secret = {"metadata": {"name": "keys", "namespace": NAMESPACE}, "data": {"list": "YQ=="}}
    world.server.put(SECRETS, secret)
    await world.settle()
    assert world.says("Degraded") == ("False", "AsExpected")


async def test_the_loss_of_a_mounted_secret_and_its_return_are_noticed_without_an_event(world: World) -> None:
    secret = {"metadata": {"name": "keys", "namespace": NAMESPACE}, "data": {"list": "YQ=="}}
    world.server.put(SECRETS, secret)
    world.apply(security={"token": {"name": "keys", "key": "list"}})
    assert (await world.settle()).again == SECRETS_SECONDS
    settled = world.api.writes()
    await world.turn()
    assert world.api.writes() == settled
    world.server.remove(SECRETS, NAMESPACE, "keys")
    assert (await world.settle()).again == SECRETS_SECONDS
    assert world.says("Degraded") == ("True", "SecretMissing")
    world.server.put(SECRETS, secret)
    await world.settle()
    assert world.says("Degraded") == ("False", "AsExpected")


async def test_an_optional_secret_of_the_environment_may_be_absent_and_rolls_pods_when_it_changes(
    world: World,
) -> None:
    def engines() -> set[str]:
        return {pod["metadata"]["uid"] for pod in world.pods("engine").values()}

    source = {"secretKeyRef": {"name": "hub", "key": "key", "optional": True}}
    of_a_map = {"configMapKeyRef": {"name": "map", "key": "key"}}
    env = [{"name": "TOKEN", "valueFrom": source}, {"name": "OTHER", "valueFrom": of_a_map}]
    world.apply(engine={"replicas": 1, "env": env})
    await world.settle()
    assert world.says("Degraded") == ("False", "AsExpected")
    before = engines()
    world.server.put(SECRETS, {"metadata": {"name": "hub", "namespace": NAMESPACE}, "data": {"key": "YQ=="}})
    await world.settle()
    assert not engines() & before


async def test_the_clusters_own_token_is_made_once(world: World) -> None:
    world.apply()
    await world.settle()
    first = world.child(SECRETS, "demo-token")["data"]["token"]
    world.reconciler.known.clear()
    await world.settle()
    assert world.child(SECRETS, "demo-token")["data"]["token"] == first
    assert len(first) >= 32


async def test_a_deleted_cluster_is_left_to_the_garbage_collector(world: World) -> None:
    made = world.apply()
    made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.server.put(CLUSTERS, made)
    await world.turn()
    assert not world.api.writes()


# ---- readiness


async def test_the_gate_opens_after_a_ready_router_mirrors_the_engine_and_only_once(world: World) -> None:
    world.programs.mirror = False
    world.apply()
    for _ in range(6):
        await world.turn()
        world.controllers()
    assert world.says("Ready")[0] == "False"
    assert world.says("CacheAware") == ("False", "NotMirrored")
    world.programs.mirror = True
    await world.settle()
    (engine,) = world.pods("engine").values()
    gates = [item for item in engine["status"]["conditions"] if item["type"] == READINESS_GATE]
    assert [item["status"] for item in gates] == ["True"]
    patches = world.api.calls["patch", "", "pods/status"]
    world.programs.mirror = False
    await world.turn()
    world.programs.mirror = True
    await world.settle()
    assert world.api.calls["patch", "", "pods/status"] == patches


async def test_the_gate_of_a_pod_made_anew_opens_even_while_the_spec_is_wrong(world: World) -> None:
    world.apply(engine={"replicas": 2})
    await world.settle()
    world.apply(engine={"replicas": 2, "dtype": "int3"})
    await world.turn()
    world.server.remove(PODS, NAMESPACE, "demo-engine-1")
    for _ in range(3):
        world.controllers()
        await world.turn()
    gates = [
        c["status"]
        for c in world.pods("engine")["demo-engine-1"]["status"]["conditions"]
        if c["type"] == READINESS_GATE
    ]
    assert gates == ["True"]
    assert world.says("Degraded") == ("True", "InvalidSpec")


async def test_ready_is_false_while_no_router_answers(world: World) -> None:
    world.apply()
    await world.settle()
    world.programs.silent = "GET http://10.0.0.1:8081: refused"
    await world.turn()
    assert world.says("Ready") == ("False", "RouterSilent")
    assert world.says("CacheAware") == ("Unknown", "RouterSilent")


async def test_tokens_that_are_not_proven_are_told(world: World) -> None:
    world.apply()
    await world.settle()
    world.programs.tokens_problem = "3 of 200 prompts differ"
    await world.turn()
    assert world.says("CacheAware") == ("False", "TokensDiffer")
    assert world.says("Ready") == ("True", "Serving")


async def test_engines_that_reuse_less_than_is_claimed_are_told(world: World) -> None:
    world.apply()
    await world.settle()
    world.programs.doubted = set(world.pods("engine"))
    await world.turn()
    assert world.says("CacheAware") == ("False", "ViewDoubted")
    assert world.says("Ready") == ("True", "Serving")


async def test_ready_is_for_the_new_generation_only_once_old_pods_are_gone(world: World) -> None:
    world.apply(engine={"replicas": 2})
    await world.settle()
    world.apply(engine={"replicas": 2, "maxModelLen": 4096})
    seen = []
    for _ in range(40):
        await world.turn()
        status = {c["type"]: c for c in world.status()["conditions"]}["Ready"]
        old = [p for p in world.pods("engine").values() if "4096" not in str(p["spec"])]
        if status["observedGeneration"] == 2:
            seen.append(status["status"])
            assert not (status["status"] == "True" and old)
        world.controllers()
    assert seen[-1] == "True"
    assert "False" in seen


async def test_ready_does_not_flicker_while_replicas_are_added(world: World) -> None:
    world.apply(engine={"replicas": 2})
    await world.settle()
    world.apply(engine={"replicas": 4})
    for _ in range(10):
        await world.turn()
        assert world.says("Ready") == ("True", "Serving")
        world.controllers()
    assert world.status()["readyReplicas"] == 4


async def test_a_controller_that_never_looks_is_told_in_the_end(world: World) -> None:
    world.apply()
    await world.settle()
    world.apply(engine={"replicas": 1, "maxModelLen": 4096})
    for _ in range(30):
        await world.turn()
    assert world.says("Ready") == ("False", "OldRevision")


async def test_zero_replicas_serve_nothing_and_say_so(world: World) -> None:
    world.apply(engine={"replicas": 0})
    for _ in range(5):
        await world.turn()
        world.controllers()
    assert world.says("Ready") == ("False", "ScaledToZero")


async def test_a_changed_secret_rolls_only_pods_that_take_it_as_environment(world: World) -> None:
    def secret(name: str, value: str) -> None:
        world.server.put(
            SECRETS, {"metadata": {"name": name, "namespace": NAMESPACE}, "data": {"key": value}}
        )

    def engines() -> set[str]:
        return {pod["metadata"]["uid"] for pod in world.pods("engine").values()}

    secret("hub", "YQ==")
    secret("controls", "YQ==")
    reference = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "key"}}}
    engine = {"replicas": 1, "env": [reference]}
    world.apply(engine=engine, security={"token": {"name": "controls", "key": "key"}})
    outcome = None
    for _ in range(12):
        outcome = await world.turn()
        world.controllers()
    assert world.says("Ready") == ("True", "Serving")
    assert outcome is not None
    assert outcome.again is not None
    before = engines()
    secret("controls", "Yg==")
    for _ in range(4):
        await world.turn()
        world.controllers()
    assert engines() == before
    secret("hub", "Yg==")
    for _ in range(12):
        await world.turn()
        world.controllers()
    assert not engines() & before
    assert world.says("Ready") == ("True", "Serving")


# ---- shared tiers

EXTERNAL = {"remote": {"redis": {"urls": ["redis://redis.example:6379"]}}}


async def test_a_shared_tier_is_lost_when_all_agents_say_so_and_back_by_itself(world: World) -> None:
    world.apply(engine={"replicas": 2}, cache=EXTERNAL)
    await world.settle()
    assert world.says("BackendReady") == ("True", "Reachable")
    world.programs.redis_problems = {"demo-engine-0": "connection refused"}
    await world.turn()
    assert world.says("BackendReady") == ("True", "Reachable")
    world.programs.redis_problems["demo-engine-1"] = "connection refused"
    await world.turn()
    assert world.says("BackendReady") == ("False", "BackendLost")
    assert world.says("Degraded") == ("True", "BackendLost")
    assert world.says("Ready") == ("True", "Serving")
    world.programs.redis_problems.clear()
    await world.turn()
    assert world.says("BackendReady") == ("True", "Reachable")
    assert world.says("Degraded") == ("False", "AsExpected")


async def test_a_managed_redis_is_lost_with_its_pods(world: World) -> None:
    world.apply(cache={"remote": {"redis": {"managed": {}}}})
    await world.settle()
    assert world.says("BackendReady") == ("True", "Reachable")
    redis = world.child(STATEFUL_SETS, "demo-redis")
    redis["status"]["readyReplicas"] = 0
    world.server.put(STATEFUL_SETS, redis)
    await world.turn()
    assert world.says("BackendReady") == ("False", "BackendLost")
    world.controllers()
    await world.turn()
    assert world.says("BackendReady") == ("True", "Reachable")


async def test_a_tier_that_nobody_can_be_asked_about_is_unknown(world: World) -> None:
    world.apply(cache=EXTERNAL)
    await world.turn()
    assert world.says("BackendReady") == ("Unknown", "NotAsked")


# ---- scale and roll


async def test_scaling_down_drains_the_highest_ordinal_first_and_one_at_a_time(world: World) -> None:
    world.apply(engine={"replicas": 3})
    await world.settle()
    token = base64.b64encode(b"secret").decode()
    world.server.put(SECRETS, {**world.child(SECRETS, "demo-token"), "data": {"token": token}})
    world.apply(engine={"replicas": 1})
    for _ in range(3):
        await world.turn()
        world.controllers()
    assert world.programs.draining == {"demo-engine-2"}
    assert world.programs.tokens[0] == "secret"
    assert world.says("Progressing") == ("True", "Draining")
    assert len(world.pods("engine")) == 3
    world.programs.drained = {"demo-engine-2"}
    for _ in range(4):
        await world.turn()
        world.controllers()
    assert sorted(world.pods("engine")) == ["demo-engine-0", "demo-engine-1"]
    world.programs.drained = {"demo-engine-1"}
    await world.settle()
    assert sorted(world.pods("engine")) == ["demo-engine-0"]
    assert {"DrainStarted", "Scaled"} <= set(world.events())


async def test_a_drain_that_never_ends_is_not_waited_for_beyond_its_deadline(world: World) -> None:
    world.apply(engine={"replicas": 2, "drainDeadline": "30s"})
    await world.settle()
    world.programs.no_agent = {"demo-engine-1"}
    world.apply(engine={"replicas": 1, "drainDeadline": "30s"})
    for _ in range(10):
        await world.turn()
        world.controllers()
    assert len(world.pods("engine")) == 2
    world.clock.seconds += 30
    await world.settle()
    assert sorted(world.pods("engine")) == ["demo-engine-0"]


async def test_a_drain_is_taken_back_when_the_engine_is_wanted_again_even_by_another_operator(
    world: World,
) -> None:
    world.apply(engine={"replicas": 2})
    await world.settle()
    world.apply(engine={"replicas": 1})
    await world.turn()
    await world.turn()
    assert world.programs.draining == {"demo-engine-1"}
    world.reconciler.known.clear()  # the operator was replaced
    world.apply(engine={"replicas": 2})
    await world.settle()
    assert world.programs.draining == set()
    assert len(world.pods("engine")) == 2
    assert "DrainUndone" in world.events()


async def test_a_change_of_the_template_rolls_by_eviction_one_pod_at_a_time(world: World) -> None:
    world.apply(engine={"replicas": 3})
    await world.settle()
    uids = {pod["metadata"]["uid"] for pod in world.pods("engine").values()}
    lowest = []

    def on_write(verb: str, resource: Resource, obj: Any) -> None:
        if verb == "evict":
            ready = sum(
                p["status"]["conditions"][-1]["status"] == "True" for p in world.pods("engine").values()
            )
            lowest.append(ready - 1)

    world.server.on_write = on_write
    world.apply(engine={"replicas": 3, "maxModelLen": 4096})
    await world.settle()
    assert not uids & {pod["metadata"]["uid"] for pod in world.pods("engine").values()}
    assert lowest == [2, 2, 2]
    assert world.events().count("Evicted") == 3


async def test_an_eviction_that_a_budget_refuses_is_told_and_tried_again(world: World) -> None:
    world.apply()
    await world.settle()
    world.server.protected = {"demo-engine-0"}
    world.apply(engine={"maxModelLen": 4096})
    for _ in range(5):
        outcome = await world.turn()
        world.controllers()
    assert world.events().count("EvictionRefused") == 1
    assert outcome.again is not None
    world.server.protected = set()
    await world.settle()
    assert world.says("Ready") == ("True", "Serving")


async def test_a_broken_revision_stops_the_rollout_and_going_back_heals_it(world: World) -> None:
    world.apply(engine={"replicas": 3})
    await world.settle()
    good = {pod["metadata"]["labels"]["controller-revision-hash"] for pod in world.pods("engine").values()}
    world.apply(engine={"replicas": 3, "maxModelLen": 1})
    world.server.on_write = lambda verb, resource, obj: None
    for _ in range(12):
        await world.turn()
        sets = world.child(STATEFUL_SETS, "demo-engine")
        world.controllers()
        update = world.child(STATEFUL_SETS, "demo-engine")["status"]["updateRevision"]
        world.broken_revisions = {update} - good
    assert sets is not None
    assert world.says("Degraded") == ("True", "Stalled")
    revisions = [p["metadata"]["labels"]["controller-revision-hash"] for p in world.pods("engine").values()]
    assert sum(revision in good for revision in revisions) == 2
    world.apply(engine={"replicas": 3})
    await world.settle()
    assert world.says("Ready") == ("True", "Serving")
    assert world.says("Degraded") == ("False", "AsExpected")


# ---- figures


async def test_figures_alone_are_written_at_most_once_a_minute(world: World) -> None:
    world.apply()
    await world.settle()
    before = world.api.calls["patch", "kvist.dev", "cacheclusters/status"]
    for count in range(1, 301):
        world.programs.figures = Figures(count, count / 2, count * 100, count * 37, count * 1.5)
        await world.turn()
    writes = world.api.calls["patch", "kvist.dev", "cacheclusters/status"] - before
    assert 1 <= writes <= 5
    assert world.status()["hit"] == "37%"
    assert world.status()["figures"]["requestHitPercent"] == 50


async def test_an_autoscaler_that_fails_is_degraded(world: World) -> None:
    autoscalers = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
    world.apply(router={"autoscaling": {"minReplicas": 1, "maxReplicas": 3}})
    await world.settle()
    scaler = world.child(autoscalers, "demo-router")
    failing = {
        "type": "ScalingActive",
        "status": "False",
        "reason": "FailedGetResourceMetric",
        "message": "no",
    }
    world.server.put(autoscalers, {**scaler, "status": {"conditions": [failing]}})
    await world.turn()
    assert world.says("Degraded") == ("True", "AutoscalerFailing")


async def test_replicas_are_left_to_an_autoscaler_once_it_owns_them(world: World) -> None:
    world.apply(router={"autoscaling": {"minReplicas": 1, "maxReplicas": 5}})
    await world.settle()
    scaled = world.child(DEPLOYMENTS, "demo-router")
    assert scaled["spec"]["replicas"] == 1
    scaled["spec"]["replicas"] = 4
    entry = {"manager": "hpa", "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    scaled["metadata"]["managedFields"] = [entry]
    world.server.put(DEPLOYMENTS, scaled)
    await world.settle()
    assert world.child(DEPLOYMENTS, "demo-router")["spec"]["replicas"] == 4
    assert "Repaired" not in world.events()
