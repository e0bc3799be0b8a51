"""Two engines under light load while parts are killed, evicted, scaled and replaced.

One cluster for all tests of this file, each of which leaves it settled: engines take a minute to start.
Its engines share chunks through a managed Redis, so what one has computed outlives its pod.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator

import pytest
import yaml

from testbed.bed import BedError
from testbed.kube import Kubectl
from testbed.load import Load, prompts
from testbed.pods import condition, moment, restarts
from testbed.release import ACCOUNT, Helm, refusals, released
from testbed.scenario import cache_cluster
from testbed.tenancy import Served, machine_tenant, served
from testbed.waiting import until

pytestmark = [pytest.mark.e2e_pod, pytest.mark.full, pytest.mark.timeout(2400)]
REDIS = {"redis": {"managed": {"memory": "192Mi"}}}
TOKEN = "agents-token"
# What users are promised: reuse is back this soon after the last pod is ready, and a dead operator replaced.
REUSE_SECONDS, TAKEOVER_SECONDS = 60, 20
LEADER = "--output=jsonpath={.spec.holderIdentity}"
ASK_AGENT = (
    "import sys, urllib.request as r; print(r.urlopen(r.Request('http://127.0.0.1:8200/v1/kvist/stats', "
    "headers={'Authorization': 'Bearer ' + sys.argv[1]})).status)"
)


def token(value: str) -> str:
    """The Secret with the agents' token."""
    data = {"token": base64.b64encode(value.encode()).decode()}
    return yaml.safe_dump({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": TOKEN}, "data": data})


@pytest.fixture(scope="module")
def pair(kubectl: Kubectl, crd: str, node: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    manifest = cache_cluster("demo", replicas=2, remote=REDIS)
    manifest["spec"]["engine"]["extraArgs"] = ["--enable-prompt-tokens-details"]
    manifest["spec"]["security"] = {"token": {"name": TOKEN, "key": "token"}}
    with machine_tenant(kubectl) as namespace, released(Helm(kubectl), namespace, replicas=2):
        kubectl("apply", f"--namespace={namespace}", "--filename=-", stdin=token("first"))
        with served(kubectl, namespace, manifest, tmp_path_factory.mktemp("story")) as cluster:
            cluster.settled(1500)
            yield cluster
            assert refusals(kubectl, namespace) == []


@pytest.fixture
def load(pair: Served) -> Iterator[Load]:
    """Runs on a settled cluster; every prompt has been asked before the test begins."""
    pair.settled()
    with Load(pair.client(), prompts()) as running:
        running.more(16)
        yield running


def right(load: Load) -> None:
    """No request has failed, and no token was wrong."""
    assert load.failures() == []
    assert {len(texts) for texts in load.texts().values()} == {1}


def test_an_engine_is_killed(pair: Served, load: Load) -> None:
    before, mark = restarts(pair.engine(1))["engine"], pair.story.mark()
    pair.pods.kill("demo-engine-1", "engine")
    killed = time.monotonic()
    load.more(8)
    print(f"engine killed: served on after {time.monotonic() - killed:.1f} s")
    assert pair.story.saw("EnginesReady", "False", mark) == "SomeNotReady"
    pair.settled()
    print(f"engine killed: all ready after {time.monotonic() - killed:.1f} s")
    assert restarts(pair.engine(1))["engine"] == before + 1
    assert pair.story.said("Ready", mark) == []
    right(load)


def test_an_agent_is_killed(pair: Served, load: Load) -> None:
    rate, engine = load.rate(), restarts(pair.engine(0))["engine"]
    pair.pods.kill("demo-engine-0", "agent")
    killed = time.monotonic()
    load.more(8)
    pair.settled()
    recovered = load.recovered(killed, 0.9 * rate)
    print(f"agent killed: reuse {rate:.2f} of before again after {recovered:.1f} s")
    assert restarts(pair.engine(0))["engine"] == engine
    right(load)


def test_the_router_is_killed(pair: Served, load: Load) -> None:
    rate, mark = load.rate(), pair.story.mark()
    (router,) = pair.parts("router")
    pair.pods.kill(router["metadata"]["name"], "router")
    killed = time.monotonic()
    assert pair.story.saw("Ready", "False", mark)
    load.more(8)
    pair.settled()
    print(f"router killed: {len(load.failures())} requests without an answer")
    recovered = load.recovered(killed, 0.9 * rate)
    print(f"router killed: reuse {rate:.2f} of before again after {recovered:.1f} s")
    # Nobody is there to answer: connections end, but no request gets a wrong status.
    assert not [failure for failure in load.failures() if failure.startswith("BedError")]
    assert {len(texts) for texts in load.texts().values()} == {1}


def test_the_operator_that_acts_is_killed(kubectl: Kubectl, pair: Served, load: Load) -> None:
    def leader() -> str:
        return kubectl("get", f"lease/{ACCOUNT}", f"--namespace={pair.namespace}", LEADER)

    first = leader()
    killed = time.monotonic()
    pair.pods.destroy(first, "operator")
    until("the takeover", lambda: leader() not in ("", first), TAKEOVER_SECONDS)
    print(f"operator killed: takeover after {time.monotonic() - killed:.1f} s")
    # Its successor does the work.
    budget = ("poddisruptionbudget/demo-engine", f"--namespace={pair.namespace}")
    kubectl("delete", *budget)
    until("the repair", lambda: bool(kubectl.get(*budget)), 60)
    pair.settled()
    assert not [event for event in pair.story.events() if event.startswith("InternalError")]
    right(load)


def test_scaled_down_and_up(kubectl: Kubectl, pair: Served, load: Load) -> None:
    rate = load.rate()
    for replicas in (1, 2):
        kubectl("scale", "cc/demo", f"--namespace={pair.namespace}", f"--replicas={replicas}")
        pair.settled()
        recovered = load.recovered(time.monotonic(), 0.9 * rate, REUSE_SECONDS)
        print(f"scaled to {replicas}: reuse {rate:.2f} of before again after {recovered:.1f} s")
        right(load)
    assert any(event.startswith("DrainStarted: demo-engine-1") for event in pair.story.events())


def test_a_rolling_change(pair: Served, load: Load) -> None:
    rate, mark = load.rate(), pair.story.mark()
    before = [pair.engine(ordinal)["metadata"]["uid"] for ordinal in (0, 1)]
    pair.patch({"spec": {"engine": {"env": [{"name": "KVIST_E2E_ROUND", "value": "1"}]}}})
    for ordinal in (1, 0):
        pair.pods.ready(f"demo-engine-{ordinal}", before[ordinal], 900)
    ready = time.monotonic()
    pair.settled()
    recovered = load.recovered(ready, 0.9 * rate, REUSE_SECONDS)
    assert recovered <= REUSE_SECONDS
    print(f"rolled: reuse {rate:.2f} of before again after {recovered:.1f} s")
    # The highest ordinal first, and the other only when its successor was ready.
    first, second = pair.engine(1), pair.engine(0)
    assert moment(condition(first, "Ready")["lastTransitionTime"]) <= moment(
        second["metadata"]["creationTimestamp"]
    )
    assert "Rolling" in [reason for _, reason in pair.story.said("Progressing", mark)]
    right(load)


def test_one_eviction_is_let_and_the_next_refused_until_it_is_over(
    kubectl: Kubectl, pair: Served, load: Load
) -> None:
    before = pair.engine(1)["metadata"]["uid"]
    evict(kubectl, pair, 1)
    with pytest.raises(BedError, match="disruption budget"):
        evict(kubectl, pair, 0)
    pair.pods.ready("demo-engine-1", before, 900)
    pair.settled()
    kubectl("delete", "pod/demo-engine-0", f"--namespace={pair.namespace}", "--wait=true", seconds=180)
    pair.settled()
    load.more(8)
    right(load)


def evict(kubectl: Kubectl, pair: Served, ordinal: int) -> None:
    """As `kubectl drain` does."""
    name = f"demo-engine-{ordinal}"
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": pair.namespace},
    }
    path = f"/api/v1/namespaces/{pair.namespace}/pods/{name}/eviction"
    kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(eviction))


def test_redis_is_lost_and_comes_back(pair: Served, load: Load) -> None:
    until("chunks in Redis", lambda: held(pair) > 0, 120)
    # A busy machine may have made Redis slow before: what is looked for has to be a change.
    pair.story.wait("Degraded", "False")
    mark = pair.story.mark()
    pair.kubectl("delete", "pod/demo-redis-0", f"--namespace={pair.namespace}", "--wait=false")
    assert pair.story.saw("BackendReady", "False", mark, 120) == "BackendLost"
    assert pair.story.saw("Degraded", "True", mark, 120) == "BackendLost"
    pair.pods.ready("demo-redis-0", seconds=300)
    pair.story.wait("BackendReady", "True")
    pair.story.wait("Degraded", "False")
    load.more(8)
    right(load)


def held(pair: Served) -> int:
    """Keys in Redis."""
    ask = "REDISCLI_AUTH=$(cat /etc/kvist/redis/password) redis-cli -p 6379 dbsize"
    command = ("exec", "demo-redis-0", f"--namespace={pair.namespace}", "--", "sh", "-c", ask)
    return int(pair.kubectl(*command).split()[-1])


def test_the_agents_token_is_rotated(kubectl: Kubectl, pair: Served, load: Load) -> None:
    before = [restarts(pair.engine(ordinal)) for ordinal in (0, 1)]
    kubectl("apply", f"--namespace={pair.namespace}", "--filename=-", stdin=token("second"))
    until("the new token", lambda: all(admits(pair, n, "second") for n in (0, 1)), 240)
    assert not admits(pair, 0, "first")
    kubectl("scale", "cc/demo", f"--namespace={pair.namespace}", "--replicas=1")
    pair.settled()
    load.more(8)
    assert restarts(pair.engine(0)) == before[0]
    right(load)


def admits(pair: Served, ordinal: int, value: str) -> bool:
    """Whether an agent takes the token."""
    where = ("exec", f"demo-engine-{ordinal}", f"--namespace={pair.namespace}", "--container=agent", "--")
    try:
        return pair.kubectl(*where, "python3", "-c", ASK_AGENT, value).strip() == "200"
    except BedError as error:
        if "401" in str(error):
            return False
        raise
