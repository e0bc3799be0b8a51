"""Controls of the whole cluster on the admin port, over real agents: selection, sums, and retirement."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from kvist_connector.protocol.retired import Retired
from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.testing.fake_engine import FakeEngine as EngineHalf
from kvist_connector.testing.fake_engine import prompt_keys
from kvist_router.mind.interface import Decision, Metadata, Report
from kvist_router.testing.engine import FakeEngine

TOKENS = list(range(40))
KEYS = prompt_keys(TOKENS)


class Cluster:
    """Two replicas, each with an agent and both halves of an engine."""

    def __init__(self, folders, engines):
        self.folders, self.engines = folders, engines
        self.urls: dict[str, str] = {}
        self.agents: dict[str, AgentProcess] = {}
        self.halves: dict[str, EngineHalf] = {}

    async def start(self, name: str) -> None:
        # A port of its own at first, the same one when it comes back.
        port = int(self.urls[name].rpartition(":")[2]) if name in self.urls else 0
        folder = self.folders[name]
        self.agents[name] = await AgentProcess.start(folder, http__port=port, disk__path=folder / "d")
        self.urls[name] = self.agents[name].url
        self.halves[name] = await EngineHalf.start(self.agents[name].socket)

    async def kill(self, name: str) -> None:
        await self.halves.pop(name).stop()
        await self.agents.pop(name).kill()

    @property
    def listed(self) -> list[dict[str, str]]:
        return [
            {"name": name, "url": engine.url, "agent": self.urls[name]}
            for name, engine in self.engines.items()
        ]

    async def settled(self, name: str) -> None:
        await self.halves[name].lookup(prompt_keys(range(9999, 10007)), "settle")

    async def store(self, name: str, keys=KEYS, **more: Any) -> None:
        await self.halves[name].store(keys, **more)
        await self.settled(name)

    async def served(self, name: str, keys=KEYS) -> int:
        found = len((await self.halves[name].lookup(keys)).refs)
        await self.settled(name)
        return found


@pytest.fixture
async def cluster(tmp_path):
    folders = {name: tmp_path / name for name in "ab"}
    for folder in folders.values():
        folder.mkdir()
    async with FakeEngine() as first, FakeEngine() as second:
        found = Cluster(folders, {"a": first, "b": second})
        await asyncio.gather(*(found.start(name) for name in "ab"))
        yield found
        for name in list(found.agents):
            await found.kill(name)


async def ask(running, http: aiohttp.ClientSession, control: str, body: Any, **headers: str) -> Any:
    url = f"{running.admin_url}/v1/kvist/{control}"
    async with http.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_each_control_asks_every_replica_and_adds_up(cluster, router, http) -> None:
    running = await router(replicas=cluster.listed)
    for name in "ab":
        await cluster.store(name)
    status, found = await ask(running, http, "lookup", {"tokens": TOKENS})
    assert status == 200
    assert {name: answer["hit_chunks"] for name, answer in found["replicas"].items()} == {"a": 5, "b": 5}
    _, pinned = await ask(running, http, "pin", {"tokens": TOKENS, "replicas": ["a"]})
    assert (pinned["chunks"], pinned["tokens"], list(pinned["replicas"])) == (5, 40, ["a"])
    _, cleared = await ask(running, http, "clear", {"tier": "memory", "dry_run": True})
    assert (cleared["chunks"], cleared["incomplete"]) == (5, [])
    await cluster.kill("b")
    _, half = await ask(running, http, "unpin", {"all": True})
    assert (half["chunks"], half["incomplete"]) == (5, ["b"])
    assert "error" in half["replicas"]["b"]


async def test_a_text_means_the_chunks_of_its_tokens(cluster, router, http) -> None:
    running = await router(replicas=cluster.listed)
    for engine in cluster.engines.values():
        engine.tokens = lambda body: [ord(letter) for letter in str(body["prompt"])]
    text = "one two three four five six seven eight nine ten"
    tokens = [ord(letter) for letter in text]
    await cluster.store("b", prompt_keys(tokens))
    status, found = await ask(running, http, "lookup", {"text": text})
    assert status == 200
    assert found["replicas"]["b"]["hit_chunks"] == len(tokens) // 8 > 0
    assert found["replicas"]["a"]["hit_chunks"] == 0


@pytest.mark.parametrize(
    ("control", "body", "field"),
    [
        ("pin", {"text": "a", "messages": []}, "messages"),
        ("pin", {"text": 1}, "text"),
        ("pin", {"all": True, "replicas": ["z"]}, "replicas"),
        ("pin", {"all": True, "replicas": [["a"]]}, "replicas"),
        ("pin", {"all": True, "replicas": [{}]}, "replicas"),
        ("pin", {"all": True, "replicas": "a"}, "replicas"),
        ("move", {"all": True, "to": ["a"]}, "to"),
        ("move", {"all": True, "to": {}}, "to"),
        ("lookup", {"text": "a", "model": {}}, "model"),
        ("lookup", {"messages": [[]]}, "messages"),
        ("lookup", {"messages": 5}, "messages"),
        ("retire", {"tag": "a", "replicas": []}, "replicas"),
        ("lookup", {"tokens": TOKENS, "tenant": "x"}, "tenant"),
        ("clear", {"tenant": "x"}, "tenant"),
        ("lookup", [1], "body"),
    ],
)
async def test_a_wrong_body_names_its_field(router, http, control, body, field) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"name": "a", "url": engine.url}])
        status, answer = await ask(running, http, control, body)
        assert (status, answer["error"]["param"]) == (400, field)


async def test_an_engine_without_agent_makes_it_incomplete(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"name": "a", "url": engine.url}])
        status, answer = await ask(running, http, "retire", {"tag": "a"})
        assert (status, answer["incomplete"]) == (200, ["a"])
        assert "no agent" in answer["replicas"]["a"]["error"]
        assert running.mind.replicas["a"].serves


async def test_controls_ask_for_the_agents_token(router, http, tmp_path) -> None:
    (tmp_path / "token").write_text("chief\n")
    async with FakeEngine() as engine:
        running = await router(
            replicas=[{"name": "a", "url": engine.url}], agent={"token_file": tmp_path / "token"}
        )
        assert (await ask(running, http, "pin", {"all": True}))[0] == 401
        assert (await ask(running, http, "pin", {"all": True}, Authorization="Bearer thief"))[0] == 401
        assert (await ask(running, http, "pin", {"all": True}, Authorization="Bearer chief"))[0] == 200


async def chosen(running) -> set[str]:
    """Where requests go, over a few."""
    found = set()
    for _ in range(8):
        body = json.dumps({"model": "m", "prompt": TOKENS}).encode()
        decision = await running.mind.decide(body, Metadata("completions"))
        assert isinstance(decision, Decision)
        await running.mind.report(decision.id, Report("cancelled"))
        found.add(decision.replica)
    return found


async def test_who_missed_a_retirement_gets_no_requests_until_it_has_it(cluster, router, until, http) -> None:
    running = await router(replicas=cluster.listed)
    for name in "ab":
        await cluster.store(name, tags=("old",))
    await cluster.kill("b")
    status, answer = await ask(running, http, "retire", {"tag": "old"})
    assert (status, answer["incomplete"], answer["replicas"]["a"]["chunks"]) == (200, ["b"], 5)
    assert await cluster.served("a") == 0
    replica = running.mind.replicas["b"]
    assert replica.behind
    assert await chosen(running) == {"a"}
    await cluster.start("b")
    await until(lambda: not replica.behind)
    assert await cluster.served("b") == 0
    # What is computed from now on is served again.
    await cluster.store("b", tags=("old",), epoch=answer["epoch"])
    assert await cluster.served("b") == 5


async def test_a_router_that_begins_learns_it_from_one_agent_and_tells_the_others(
    cluster, router, until, http
) -> None:
    await cluster.store("b", tags=("old",))
    async with http.post(
        f"{cluster.agents['a'].url}/v1/kvist/retire", json={"tag": "old", "epoch": 7}
    ) as answer:
        assert answer.status == 200
    running = await router(replicas=cluster.listed)

    async def told() -> Retired:
        async with http.get(f"{cluster.agents['b'].url}/v1/kvist/retired") as answer:
            return (await answer.json())["epoch"]

    await until(lambda: not any(replica.behind for replica in running.mind.replicas.values()))
    async for epoch in every(told):
        if epoch == 7:
            break
    assert await cluster.served("b") == 0


async def every(question):
    """Answers until somebody has had enough; each is a round trip."""
    while True:
        yield await question()
