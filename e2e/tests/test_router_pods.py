"""Two routers of several processes each, in front of two engines: they hear each other, and lose nobody.

One cluster for all tests of this file, each of which leaves it settled: engines take a minute to start.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from testbed.client import Client
from testbed.kube import Kubectl
from testbed.load import Load, prompts
from testbed.pods import restarts
from testbed.release import Helm, refusals, released
from testbed.routers import kill_process, port, sample, straight, stream
from testbed.scenario import cache_cluster
from testbed.small_pods import apply, connects, pod, ready
from testbed.tenancy import Served, machine_tenant, served
from testbed.waiting import LONG_PAUSE, until

pytestmark = [pytest.mark.e2e_pod, pytest.mark.full, pytest.mark.timeout(1500)]
NAME = "demo"
RELAYS = 2
PORTS = ("router", "router-admin", "neighbours")
TREES = ("ash", "beech", "cedar", "elm", "fir", "hazel", "larch", "lime", "pine", "rowan", "spruce", "yew")
# Longer than a router that ends takes new requests.
LONG = 384


@pytest.fixture(scope="module")
def pair(kubectl: Kubectl, crd: str, node: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    manifest = cache_cluster(NAME, replicas=2)
    manifest["spec"]["router"] |= {"replicas": 2, "relays": RELAYS}
    folder = tmp_path_factory.mktemp("story")
    with (
        machine_tenant(kubectl) as namespace,
        released(Helm(kubectl), namespace),
        served(kubectl, namespace, manifest, folder) as cluster,
    ):
        cluster.settled(1200)
        yield cluster
        assert refusals(kubectl, namespace) == []


def routers(pair: Served) -> list[dict[str, Any]]:
    """The two that stay."""
    found = [pod for pod in pair.parts("router") if "deletionTimestamp" not in pod["metadata"]]
    assert len(found) == 2
    return found


def hear_each_other(pair: Served) -> None:
    """Wait until both say so."""
    clients = [straight(pair.client(), router) for router in routers(pair)]

    def states() -> list[tuple[float, float]]:
        name = "kvist_router_neighbours"
        return [(sample(c, name, state="heard"), sample(c, name, state="unheard")) for c in clients]

    until("both heard", lambda: states() == [(1, 0), (1, 0)], 120, lambda: str(states()), LONG_PAUSE)


def test_routers_of_several_processes_hear_each_other(pair: Served) -> None:
    hear_each_other(pair)
    for router in routers(pair):
        client = straight(pair.client(), router)
        processes = {
            role: sample(client, "kvist_router_processes", process=role) for role in ("mind", "relay")
        }
        assert processes == {"mind": 1, "relay": RELAYS}


def test_the_port_of_routers_is_open_to_routers_alone(kubectl: Kubectl, pair: Served) -> None:
    apply(kubectl, pair.namespace, pod("stranger", "/usr/bin/sleep", "infinity"))
    ready(kubectl, pair.namespace, "stranger")
    one, other = routers(pair)
    places = {f"{other['status']['podIP']}:{port(other, name)}": name for name in PORTS}
    reached = {
        source: {places[place] for place in connects(kubectl, pair.namespace, source, places)}
        for source in ("stranger", f"{NAME}-engine-0", one["metadata"]["name"])
    }
    # Clients' port is everybody's.
    assert reached == {
        "stranger": {"router"},
        f"{NAME}-engine-0": {"router"},
        one["metadata"]["name"]: {"router", "neighbours"},
    }


def test_new_prompts_at_both_routers_spread_over_the_engines(pair: Served) -> None:
    clients = [straight(pair.client(), router) for router in routers(pair)]
    asked = prompts(TREES)
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(
            threads.map(lambda n: clients[n % 2].complete(asked[n], seconds=300), range(len(asked)))
        )
    taken = Counter(answer.replica for answer in answers)
    assert set(taken) == {f"{NAME}-engine-0", f"{NAME}-engine-1"}
    assert min(taken.values()) >= len(asked) // 4, taken


def test_requests_go_by_hash_while_a_mind_is_gone(kubectl: Kubectl, pair: Served) -> None:
    hear_each_other(pair)
    router = routers(pair)[0]
    client = straight(pair.client(), router)
    with Load(client, prompts()) as load:
        load.more(8)
        assert kill_process(kubectl, router, "mind") == 1
        until("a request by hash", lambda: routed_by(client) == "hash", 60, load.last_words)
        until("one by the index again", lambda: routed_by(client) == "", 120, load.last_words)
        load.more(8)
    right(load)
    assert sample(client, "kvist_router_without_mind_total") >= 1
    assert sample(client, "kvist_router_process_restarts_total", process="mind") == 1
    hear_each_other(pair)
    # It is no pod's business: the same containers run.
    assert restarts(pair.pods.get(router["metadata"]["name"]) or {}) == restarts(router)
    pair.settled()


def routed_by(client: Client) -> str:
    """How the router chose for one more request."""
    return client.complete("Which tree bears acorns?").routed_by


def test_a_router_that_is_drained_loses_no_stream(kubectl: Kubectl, pair: Served) -> None:
    gone, other = routers(pair)
    leaving, staying = straight(pair.client(), gone), straight(pair.client(), other)
    asked = prompts()
    with Load(pair.client(), asked[:1], clients=1) as load, ThreadPoolExecutor(len(asked)) as threads:
        load.more(2)
        begun = [threading.Event() for _ in asked]
        streams = [
            threads.submit(stream, leaving, prompt, LONG, event, 600)
            for prompt, event in zip(asked, begun, strict=True)
        ]
        until("all streams", lambda: all(event.is_set() for event in begun), 300)
        assert not any(running.done() for running in streams)
        kubectl("delete", f"pod/{gone['metadata']['name']}", f"--namespace={pair.namespace}", "--wait=false")
        answers = [running.result(600) for running in streams]
        load.more(4)
    assert load.failures() == []
    assert [(answer.tokens, answer.whole) for answer in answers] == [(LONG, True)] * len(asked)
    # Sums are rounded by how many are computed together, so long texts part ways in the end.
    short = [staying.complete(prompt).text for prompt in asked]
    assert all(answer.text.startswith(text) for answer, text in zip(answers, short, strict=True))
    pair.settled()
    hear_each_other(pair)


def right(load: Load) -> None:
    """No request has failed, and no token was wrong."""
    assert load.failures() == []
    assert {len(texts) for texts in load.texts().values()} == {1}
