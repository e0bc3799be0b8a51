"""What `kvist` says when replicas behind a router refuse: words, the list, the exit code; no traceback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvist_cli.app import app
from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.testing.fake_engine import FakeEngine as Engine
from kvist_router.testing.engine import FakeEngine

REFUSED = {
    "retire": ("--tag", "x", "--revision", "y"),
    "move": ("--tag", "x", "--to", "redis"),
    "lookup": ("--key", "zz"),
    "clear": ("--lora", "support"),
}


@pytest.fixture
async def admin(router: Any, tmp_path: Path) -> AsyncIterator[str]:
    """A router's admin address: one engine with an agent, one without."""
    agent = await AgentProcess.start(tmp_path, memory="8Mi")
    async with FakeEngine() as first, FakeEngine() as second:
        whole = {"name": "whole", "url": first.url, "agent": agent.url}
        yield (await router(replicas=[whole, {"name": "bare", "url": second.url}])).admin_url
    await agent.terminate()


async def run(*arguments: str, **env: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=env)


@pytest.mark.parametrize("command", REFUSED)
async def test_a_replicas_refusal_is_said_in_its_words(command: str, admin: str) -> None:
    asked = (command, *REFUSED[command], "--router", admin)
    done = await run(*asked, COLUMNS="200")
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert "incomplete: whole, bare" in done.output
    plain = json.loads((await run(*asked, "--json")).output)
    assert plain["whole"]["status"] == 400
    assert f"whole: {plain['whole']['error']}\n" in done.output


async def test_a_lookup_for_scripts_says_who_is_missing(admin: str) -> None:
    done = await run("lookup", "--all", "--router", admin, "--json")
    found = json.loads(done.output)
    assert (done.exit_code, found["incomplete"], found["whole"]["hit_chunks"]) == (1, ["bare"], 0)


async def test_one_replica_alone_is_asked(admin: str) -> None:
    done = await run("lookup", "--all", "--router", admin, "--replica", "whole", "--json")
    assert (done.exit_code, list(json.loads(done.output))) == (0, ["whole"])
    wrong = await run("clear", "--router", admin, "--replica", "hole")
    assert (wrong.exit_code, "hole" in wrong.output) == (1, True)


async def test_a_tenant_is_the_routers_to_know(admin: str) -> None:
    done = await run("lookup", "--key", "00" * 16, "--tenant", "batch", "--router", admin)
    assert (done.exit_code, "tenant goes with tokens, text or messages" in done.output) == (1, True)


@pytest.mark.parametrize("by_router", [True, False], ids=["router", "agent"])
async def test_a_tier_that_was_not_told_of_a_retirement_is_named(
    router: Any, tmp_path: Path, by_router: bool
) -> None:
    agent = await AgentProcess.start(tmp_path, memory="8Mi", redis__urls="redis://127.0.0.1:1/0")
    tier_user = await Engine.start(agent.socket)
    async with FakeEngine() as served:
        admin = (await router(replicas=[{"name": "a", "url": served.url, "agent": agent.url}])).admin_url
        whom = ("--router", admin) if by_router else ("--agent", agent.url)
        done = await run("retire", "--tag", "old", *whom, COLUMNS="200")
    await tier_user.stop()
    await agent.terminate()
    assert done.exit_code == 1
    assert "retired, not told yet: redis\n" in done.output
    assert f"incomplete: {'a' if by_router else agent.url.removeprefix('http://')}\n" in done.output


async def test_everything_cannot_be_retired() -> None:
    done = await run("retire", "--all", "--router", "http://127.0.0.1:1")
    assert (done.exit_code, "No such option" in done.output) == (2, True)


async def test_variables_are_called_like_their_flags() -> None:
    done = await run("pin", "--router", "http://127.0.0.1:1", KVIST_PIN_ALL="1", KVIST_PIN_FOR="soon")
    assert (done.exit_code, "--for soon" in done.output) == (2, True)
    assert "no such option" in (await run("pin", "--all", KVIST_PIN_FOUR="1h")).output
