"""Dry runs and shadow policies: what would be done is told, and nothing is done."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvist_cli.app import app
from kvist_router.mind.interface import Decision, Metadata, Report
from kvist_router.testing.engine import FakeEngine

COMPLETIONS = Metadata("completions")
TOKENS = list(range(1000, 1600))


def body(prompt: Any = TOKENS, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, "stream": True, **fields}).encode()


@pytest.fixture
async def two(router):
    async with FakeEngine() as first, FakeEngine() as second:

        async def start(**values: Any):
            listed = [{"name": "a", "url": first.url}, {"name": "b", "url": second.url}]
            return await router(replicas=listed, **values)

        yield start


async def sent(running) -> Decision:
    decision = await running.mind.decide(body(), COMPLETIONS)
    assert isinstance(decision, Decision)
    for event in ("first_byte", "ended"):
        await running.mind.report(decision.id, Report(event))
    return decision


async def test_a_dry_run_tells_what_a_request_would_meet_and_leaves_no_trace(two, http) -> None:
    running = await two()
    before = await sent(running)
    url = f"{running.admin_url}/v1/kvist/explain?path=completions"
    async with http.post(url, data=body()) as answer:
        found = await answer.json()
    assert (found["replica"], found["predicted_tokens"]) == (before.replica, 512)
    assert {item["replica"] for item in found["considered"]} == {"a", "b"}
    # What computing itself costs is a part of the choice, so it is told.
    assert all((item["work"] > 0) == (item["recompute"] > 0) for item in found["considered"])
    assert found["outcome"] == "not sent"
    mind = running.mind
    assert (len(mind.in_flight), [item.id for item in mind.records.latest(9)]) == (0, [before.id])
    assert all(replica.outstanding_requests == 0 for replica in mind.replicas.values())


async def test_a_dry_run_does_not_take_a_turn(two) -> None:
    running = await two(policy="round-robin", shadows=["round-robin"])
    found = [await running.mind.explain(body(), COMPLETIONS) for _ in range(3)]
    assert [item.replica for item in found] == ["a"] * 3
    assert (await sent(running)).replica == "a"
    assert (await sent(running)).replica == "b"


async def test_what_would_be_refused_is_explained_by_the_refusal(two, http) -> None:
    running = await two()
    url = f"{running.admin_url}/v1/kvist/explain?path=completions"
    async with http.post(url, data=b'{"model": "m", "model": "m"}') as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "duplicate_key")
    async with http.post(url, data=body(model="unknown")) as answer:
        assert answer.status == 404


async def test_with_a_token_only_its_holder_is_told(two, http, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    running = await two(agent={"token_file": str(token)})
    url = f"{running.admin_url}/v1/kvist/explain?path=completions"
    async with http.post(url, data=body()) as answer:
        assert answer.status == 401
    async with http.post(url, data=body(), headers={"Authorization": "Bearer secret"}) as answer:
        assert answer.status == 200


async def test_the_command_shows_every_replica_and_the_reason(two, tmp_path: Path) -> None:
    running = await two()
    before = await sent(running)
    file = tmp_path / "request.json"
    file.write_bytes(body())
    asked = ["explain", str(file), "--router", running.admin_url]
    said = await asyncio.to_thread(CliRunner().invoke, app, asked)
    assert said.exit_code == 0, said.output
    assert f"{before.replica}: " in said.output
    assert "512 of 600 tokens reused" in said.output
    said = await asyncio.to_thread(CliRunner().invoke, app, [*asked, "--json"])
    assert json.loads(said.stdout)["replica"] == before.replica


async def test_shadows_are_counted_and_not_followed(two, http) -> None:
    """Of equal replicas `kvist` keeps the one that holds the prompt; `round-robin` alternates."""
    running = await two(shadows=["round-robin", "least-load"])
    decisions = [await sent(running) for _ in range(6)]
    assert len({decision.replica for decision in decisions}) == 1
    async with http.get(f"{running.admin_url}/metrics") as answer:
        text = await answer.text()
    assert 'kvist_router_shadow_choices_total{choice="other",policy="round-robin"} 3.0' in text
    assert 'kvist_router_shadow_choices_total{choice="same",policy="round-robin"} 3.0' in text
    seconds = {
        of: float(text.split(f'{{of="{of}",policy="round-robin"}} ')[1].split("\n")[0])
        for of in ("actual", "predicted", "elsewhere")
    }
    assert seconds["elsewhere"] > seconds["predicted"] > 0
    assert seconds["actual"] > 0
    elsewhere = [record.elsewhere.get("round-robin") for record in running.mind.records.latest(6)]
    assert elsewhere.count(None) == 3


async def test_a_shadow_without_feeds_judges_by_dispatches(two) -> None:
    running = await two(shadows=["approximate"])
    await sent(running)
    await sent(running)
    assert running.mind.records.latest(1)[0].elsewhere == {}
