"""Moves between replicas on the admin port, over real agents that read from each other."""

from __future__ import annotations

import pytest

from kvist_connector.testing.fake_engine import FakeEngine as EngineHalf
from kvist_connector.testing.fake_engine import prompt_keys
from kvist_connector.testing.peer_agents import PeerAgent
from kvist_router.controls.fanout import FanOut
from kvist_router.controls.moving import Mover
from kvist_router.mind.agent_link import AgentLink
from kvist_router.testing.engine import FakeEngine

pytestmark = pytest.mark.timeout(120)
TOKENS = list(range(40))
KEYS = prompt_keys(TOKENS)
BYTES = 16384


class Cluster:
    """Replicas a, b and c; c lets nobody read."""

    def __init__(self, engines, token):
        self.engines, self.token = engines, token
        self.agents: dict[str, PeerAgent] = {}
        self.halves: dict[str, EngineHalf] = {}

    async def start(self, name: str, folder) -> None:
        agent = self.agents[name] = await PeerAgent.start(folder / name, token="chief", serves=name != "c")
        await agent.serve_api()
        self.halves[name] = await agent.engine()

    async def kill(self, name: str) -> None:
        del self.halves[name]
        await self.agents.pop(name).stop()

    @property
    def listed(self) -> list[dict[str, str]]:
        return [
            {"name": name, "url": engine.url, "agent": self.agents[name].api_url}
            for name, engine in self.engines.items()
        ]

    async def store(self, name: str, keys=KEYS) -> None:
        await self.halves[name].store(keys)
        assert await self.served(name, keys) == len(keys)

    async def served(self, name: str, keys=KEYS) -> int:
        half = self.halves[name]
        found = await half.lookup(keys)
        assert half.holds(keys, found)
        await half.lookup(prompt_keys(range(9999, 10007)), "settle")  # leases have ended
        return len(found.refs)


@pytest.fixture
async def cluster(tmp_path):
    token = tmp_path / "token"
    token.write_text("chief")
    async with FakeEngine() as one, FakeEngine() as two, FakeEngine() as three:
        found = Cluster({"a": one, "b": two, "c": three}, token)
        for name in "abc":
            await found.start(name, tmp_path)
        yield found
        for name in list(found.agents):
            await found.kill(name)


@pytest.fixture
async def move(cluster, router, http):
    running = await router(replicas=cluster.listed, agent={"token_file": cluster.token})

    async def ask(**body):
        headers = {"Authorization": "Bearer chief"}
        url = f"{running.admin_url}/v1/kvist/move"
        async with http.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    return ask


async def test_a_move_leaves_one_copy_wherever_there_were_some(cluster, move) -> None:
    await cluster.store("a")
    await cluster.store("b", KEYS[:3])
    body = {"tokens": TOKENS, "to": "b", "replicas": ["a", "b"]}
    _, would = await move(**body, dry_run=True)
    assert (would["chunks"], await cluster.served("a"), await cluster.served("b")) == (5, 5, 3)
    status, did = await move(**body)
    assert (status, did["incomplete"]) == (200, [])
    assert (did["chunks"], did["tokens"], did["bytes"]) == (5, 40, 5 * BYTES)
    assert did["replicas"]["a"]["missing"] == 0
    assert (await cluster.served("a"), await cluster.served("b")) == (0, 5)
    _, again = await move(**body)
    assert (again["chunks"], again["incomplete"]) == (0, [])


async def test_a_copy_leaves_two(cluster, move) -> None:
    await cluster.store("a")
    _, did = await move(all=True, to="b", copy=True, replicas=["a"])
    assert (did["chunks"], did["incomplete"]) == (5, [])
    assert (await cluster.served("a"), await cluster.served("b")) == (5, 5)


async def test_who_cannot_give_keeps_what_it_has_and_is_named(cluster, move) -> None:
    await cluster.store("a")
    await cluster.store("c", KEYS[:2])
    _, did = await move(all=True, to="b")
    assert (did["chunks"], did["incomplete"]) == (5, ["c"])
    assert "set peer.host" in did["replicas"]["c"]["error"]
    assert (await cluster.served("b"), await cluster.served("c")) == (5, 2)


async def test_a_target_that_cannot_take_leaves_all_where_it_is(cluster, move) -> None:
    await cluster.store("a")
    _, did = await move(all=True, to="c", replicas=["a"])
    assert (did["chunks"], did["incomplete"]) == (0, ["a"])
    assert "c: this agent reads from nobody" in did["replicas"]["a"]["error"]
    await cluster.kill("b")
    _, did = await move(all=True, to="b", replicas=["a"])
    assert (did["chunks"], did["incomplete"]) == (0, ["a"])
    assert await cluster.served("a") == 5


async def test_where_to_is_a_tier_or_a_replica(cluster, move) -> None:
    for wrong in ("z", 1, None):
        status, answer = await move(all=True, to=wrong)
        assert (status, answer["error"]["param"]) == (400, "to")
        assert f"{wrong!r} is neither a tier nor a replica" in answer["error"]["message"]
        assert answer["error"]["message"].endswith("valid: memory, disk, redis, object, a, b, c")


async def test_at_the_deadline_what_was_not_moved_stays_and_is_said(cluster, router, http) -> None:
    await cluster.store("a")
    running = await router(replicas=cluster.listed, agent={"token_file": cluster.token})
    fanout = FanOut(http, AgentLink("test", cluster.token), 60)
    replicas = running.mind.replicas
    answers = await Mover(fanout, 0.0, lambda: 1.0).move([replicas["a"]], replicas["b"], {"all": True})
    assert answers["a"]["complete"] is False
    assert (answers["a"]["chunks"], answers["a"]["missing"]) == (0, 5)
    assert await cluster.served("a") == 5
