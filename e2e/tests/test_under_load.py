"""Two engines under light load while parts are killed.

One cluster for all tests of this file, each of which leaves it settled: engines take a minute to start.
Its engines share chunks through a managed Redis, so what one has computed outlives its pod.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator

import pytest
import yaml

from testbed.kube import Kubectl
from testbed.load import Load, prompts
from testbed.pods import restarts
from testbed.release import Helm, refusals, released
from testbed.scenario import cache_cluster
from testbed.tenancy import Served, machine_tenant, served

pytestmark = [pytest.mark.e2e_pod, pytest.mark.full, pytest.mark.timeout(2400)]
REDIS = {"redis": {"managed": {"memory": "192Mi"}}}
TOKEN = "agents-token"


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
