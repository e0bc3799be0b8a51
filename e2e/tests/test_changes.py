"""Two engines under light load while autoscalers, bad revisions and a node's drain change them.

One cluster of two engines and two routers for all tests of this file, which build on each other's end:
engines take a minute to start.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from testbed.autoscaler import autoscaler
from testbed.bed import BedError
from testbed.burst import burst
from testbed.host_folders import engine_overlay, environment_folders
from testbed.kube import Kubectl
from testbed.load import Load, prompts
from testbed.pods import condition, is_ready, moment, restarts
from testbed.release import Helm, refusals, released
from testbed.routers import straight
from testbed.scale import Scale
from testbed.scenario import ENGINE_IMAGE, cache_cluster
from testbed.tenancy import Served, machine_tenant, served
from testbed.waiting import LONG_PAUSE, until

pytestmark = [pytest.mark.e2e_pod, pytest.mark.full, pytest.mark.timeout(1500)]
NAME = "pool"
ARGUMENTS = ["--enable-prompt-tokens-details"]
IN_FLIGHT = 4
# Longer than kubelet waits for a sign of life of a program that has started: ten seconds, six times.
LOADING_SECONDS = 70
LOADS_SLOWLY = ["sh", "-c", f'sleep {LOADING_SECONDS}; exec python3 "$0" "$@"']


@pytest.fixture(scope="module")
def pool(kubectl: Kubectl, crd: str, node: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Nobody but a writer of the scale subresource has asked for its two engines.

    Probes of routers are patient, so that one that was stopped is still ready when it is asked.
    """
    manifest = cache_cluster(NAME, replicas=0)
    manifest["spec"]["engine"]["extraArgs"] = ARGUMENTS
    limits = {"queueDeadline": "10m", "concurrentRequests": IN_FLIGHT}
    patient = {"spec": {"containers": [{"name": "router", "readinessProbe": {"failureThreshold": 30},
                                        "livenessProbe": {"failureThreshold": 30}}]}}  # fmt: skip
    manifest["spec"]["router"] |= {"replicas": 2, "limits": limits, "podTemplate": patient}
    folder = tmp_path_factory.mktemp("story")
    with (
        machine_tenant(kubectl) as namespace,
        released(Helm(kubectl), namespace),
        served(kubectl, namespace, manifest, folder) as cluster,
    ):
        assert cluster.story.wait("Ready", "False")["reason"] == "ScaledToZero"
        Scale(kubectl, namespace, NAME).write(2)
        cluster.settled(1200)
        yield cluster
        assert refusals(kubectl, namespace) == []


@pytest.fixture
def load(pool: Served) -> Iterator[Load]:
    """Runs on a settled cluster; every prompt has been asked before the test begins."""
    pool.settled()
    with Load(pool.client(), prompts()) as running:
        running.more(8)
        yield running


def right(load: Load) -> None:
    """No request has failed, and no token was wrong."""
    assert load.failures() == []
    assert {len(texts) for texts in load.texts().values()} == {1}


def answers_when_ready(pool: Served) -> None:
    """As a script does it: `kubectl wait`, and then a request."""
    pool.kubectl("wait", f"cc/{NAME}", f"--namespace={pool.namespace}", "--for=condition=Ready",
                 "--timeout=900s", seconds=910)  # fmt: skip
    assert pool.client().complete().text


def test_ready_is_about_the_generation_that_was_applied(pool: Served) -> None:
    pool.patch({"spec": {"router": {"env": [{"name": "KVIST_E2E_ROUND", "value": "1"}]}}})
    answers_when_ready(pool)
    assert [variable(pod, "KVIST_E2E_ROUND") for pod in staying(pool, "router")] == ["1", "1"]


def test_every_router_is_asked_whether_it_is_cache_aware(pool: Served) -> None:
    pool.settled()
    mark = pool.story.mark()
    silent = staying(pool, "router")[1]["metadata"]["name"]
    with pool.pods.stopped(silent, "router"):
        # A cluster in which nothing happens is asked every 15 seconds.
        assert pool.story.saw("CacheAware", "Unknown", mark, 120) == "RouterSilent"
        assert pool.story.now("CacheAware")["message"].startswith(f"{silent}: ")
    pool.settled()
    # The other router answered all the time.
    assert pool.story.said("Ready", mark) == []


def test_a_revision_that_cannot_start_stops_at_one_engine_and_is_taken_back(
    kubectl: Kubectl, pool: Served, load: Load
) -> None:
    first, mark = pool.engine(0), pool.story.mark()
    pool.patch({"spec": {"engine": {"image": "kvist.dev/engine:none"}}})
    stalled(pool, "load the image on the node")
    broken = pool.engine(1)["metadata"]["uid"]
    # The next revision is as bad, in another way: it takes the place of the broken one.
    pool.patch({"spec": {"engine": {"image": ENGINE_IMAGE, "extraArgs": ["--no-such-flag"]}}})
    stalled(pool, "kubectl logs --previous")
    assert pool.engine(1)["metadata"]["uid"] != broken
    assert is_ready(pool.engine(0))
    load.more(4)
    pool.patch({"spec": {"engine": {"extraArgs": ARGUMENTS}}})
    answers_when_ready(pool)
    pool.settled()
    assert pool.story.now("Degraded")["status"] == "False"
    assert "Stalled" in [reason for _, reason in pool.story.said("Progressing", mark)]
    # The one that served was left alone from beginning to end.
    assert pool.engine(0)["metadata"]["uid"] == first["metadata"]["uid"]
    assert restarts(pool.engine(0)) == restarts(first)
    load.more(8)
    right(load)


def stalled(pool: Served, remedy: str) -> None:
    """Wait until Degraded names the engine that went first, what ails it and what to do."""

    def told() -> bool:
        said = pool.story.now("Degraded")
        words: str = said.get("message", "")
        return said.get("reason") == "Stalled" and words.startswith("pool-engine-1: ") and remedy in words

    until(f"Degraded with {remedy!r}", told, 600, pool.story.told, LONG_PAUSE)


def test_a_node_is_drained(kubectl: Kubectl, node: str, pool: Served, load: Load) -> None:
    before, mark = uids(pool), pool.story.mark()
    selector = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component=engine"
    try:
        # One goes. Its successor finds no node, so the budget keeps the other.
        with pytest.raises(BedError, match="disruption budget"):
            kubectl("drain", node, f"--pod-selector={selector}", "--ignore-daemonsets",
                    "--delete-emptydir-data", "--timeout=40s", seconds=100)  # fmt: skip
        until("a successor", lambda: len(uids(pool)) == 2, 120, pause=LONG_PAUSE)
        assert len(uids(pool) - before) == 1
        assert pool.story.saw("Degraded", "True", mark) == "EngineBroken"
        assert "no node takes it" in pool.story.now("Degraded")["message"]
    finally:
        kubectl("uncordon", node)
    pool.settled()
    assert len(uids(pool) - before) == 1
    load.more(8)
    right(load)


def uids(pool: Served) -> set[str]:
    """Of the engine pods that stay."""
    return {pod["metadata"]["uid"] for pod in staying(pool, "engine")}


def staying(pool: Served, component: str) -> list[dict[str, Any]]:
    """Pods that are not ending."""
    return [pod for pod in pool.parts(component) if "deletionTimestamp" not in pod["metadata"]]


def test_the_scale_subresource_says_what_an_autoscaler_reads(pool: Served) -> None:
    scale = Scale(pool.kubectl, pool.namespace, NAME).read()
    assert (scale["kind"], scale["spec"]["replicas"], scale["status"]["replicas"]) == ("Scale", 2, 2)
    counted = pool.pods.named(*scale["status"]["selector"].split(","))
    assert {pod["metadata"]["name"] for pod in counted} == {"pool-engine-0", "pool-engine-1"}


def test_an_autoscaler_changes_the_number_of_engines(kubectl: Kubectl, pool: Served, load: Load) -> None:
    with autoscaler(kubectl, pool.namespace, NAME) as bounds:
        bounds.bounds(3, 4)
        pool.pods.ready("pool-engine-2", seconds=900)
        pool.settled()
        mark = pool.story.mark()
        bounds.bounds(1, 1)
        until("one engine", lambda: len(pool.parts("engine")) == 1, 300, pool.story.told, LONG_PAUSE)
        pool.settled()
    events = pool.story.events()
    # Two fewer at once were asked for: each drained before its number was taken away, one after the other.
    for told in ("DrainStarted: pool-engine-2", "3 to 2", "DrainStarted: pool-engine-1", "2 to 1"):
        assert any(event.removeprefix("Scaled: ").startswith(told) for event in events), events
    listed = [version.get("status", {}).get("engines", []) for version in pool.story.versions()[mark:]]
    assert max(sum(engine["draining"] for engine in engines) for engines in listed) == 1
    right(load)


def test_requests_wait_while_the_only_engine_is_replaced_by_one_that_loads_slowly(pool: Served) -> None:
    scaled_to_one(pool)
    old, mark = pool.engine(0)["metadata"]["uid"], pool.story.mark()
    full, other = (straight(pool.client(), pod) for pod in staying(pool, "router"))
    overlay = engine_overlay(environment_folders())
    overlay["spec"]["containers"][0]["command"] = LOADS_SLOWLY
    with Load(other, prompts(), patience=600) as load, ThreadPoolExecutor(IN_FLIGHT + 3) as threads:
        load.more(4)
        pool.patch({"spec": {"engine": {"podTemplate": overlay}}})
        until("its end", lambda: bool(uids(pool) - {old}), 300, pool.story.told, LONG_PAUSE)
        replies = burst(full, IN_FLIGHT + 3, threads)
        new = pool.pods.ready("pool-engine-0", old, 900)
        waited = [reply.result(600) for reply in replies]
        answers_when_ready(pool)  # not before: until they are answered that router is at its limit
        load.more(8)
    # As many as the limit says wait and are answered; the rest is told at once to come again.
    assert sorted(reply.status for reply in waited) == [200] * IN_FLIGHT + [503] * 3
    assert all(reply.retry_after for reply in waited if reply.status == 503)
    right(load)
    assert "NoneReady" in [reason for _, reason in pool.story.said("EnginesReady", mark)]
    loaded_in_peace(new)


def loaded_in_peace(engine: dict[str, Any]) -> None:
    """It took longer than a dead one is given, and kubelet let it."""
    assert restarts(engine)["engine"] == 0
    (container,) = engine["spec"]["containers"]
    (status,) = engine["status"]["containerStatuses"]
    started = moment(status["state"]["running"]["startedAt"])
    took = moment(condition(engine, "ContainersReady")["lastTransitionTime"]) - started
    liveness = container["livenessProbe"]
    assert took.total_seconds() > liveness["periodSeconds"] * liveness["failureThreshold"]


def scaled_to_one(pool: Served) -> None:
    """Whatever ran before."""
    scale = Scale(pool.kubectl, pool.namespace, NAME)
    if scale.read()["spec"].get("replicas") != 1:
        scale.write(1)
    pool.settled()


def variable(pod: dict[str, Any], name: str) -> str:
    """An environment variable of the pod's only container; empty when it has none of the name."""
    (container,) = pod["spec"]["containers"]
    return next((str(entry["value"]) for entry in container["env"] if entry["name"] == name), "")
