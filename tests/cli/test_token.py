"""Agents that ask for a token, as those on Kubernetes do: real agents, reached by address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvist_cli.app import app
from kvist_connector.testing.agent_process import AgentProcess

TOKEN = "secret-of-sixteen-bytes"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture
async def agent(tmp_path: Path, token: Path) -> AsyncIterator[str]:
    process = await AgentProcess.start(tmp_path, memory="8Mi", http__token_file=token)
    yield process.url
    await process.terminate()


async def call(*arguments: str, **env: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=env)


@pytest.mark.parametrize(
    "command",
    [("stats",), ("clear", "--tier", "memory"), ("lookup", "--key", "00" * 16), ("status",)],
    ids=lambda command: command[0],
)
async def test_the_agents_commands_send_the_token_of_a_file(
    command: tuple[str, ...], agent: str, token: Path
) -> None:
    asked = (*command, "--agent", agent, "--json")
    refused = await call(*asked)
    assert refused.exit_code == 1
    assert "answered 401" in refused.output
    assert "--token-file" in refused.output
    assert (await call(*asked, "--token-file", str(token))).exit_code == 0
    assert (await call(*asked, KVIST_TOKEN_FILE=str(token))).exit_code == 0


async def test_the_status_by_address_tells_of_tiers(agent: str, token: Path) -> None:
    done = await call("status", "--agent", agent, "--token-file", str(token))
    assert "memory 0 chunks" in done.output
    plain = await call("status", "--agent", agent, "--token-file", str(token), "--json")
    assert json.loads(plain.output)["healthy"] is True


async def test_no_terminal_is_too_narrow_for_a_figure(agent: str, token: Path) -> None:
    asked = ("stats", "--agent", agent, "--token-file", str(token))
    wide, narrow = [await call(*asked, COLUMNS=columns) for columns in ("200", "20")]
    assert narrow.output == wide.output
    assert "tiers.memory.bytes" in narrow.output
    assert "\u2026" not in narrow.output


async def test_a_router_that_does_not_answer_is_not_healthy(unused_tcp_port: int) -> None:
    done = await call("status", "--router", f"http://127.0.0.1:{unused_tcp_port}", "--json")
    assert done.exit_code == 1
    assert "does not answer" in json.loads(done.output)["router"]["error"]


@pytest.mark.parametrize("content", ["", "two words", "line\nline", "caf\u00e9"])
def test_a_file_that_holds_no_token_is_bad_input(content: str, token: Path) -> None:
    token.write_text(content)
    asked = ["stats", "--agent", "http://127.0.0.1:1", "--token-file", str(token)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 2
    assert "must hold one token and nothing else" in done.output


async def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    done = await call("stats", "--agent", "http://127.0.0.1:1", "--token-file", str(tmp_path / "none"))
    assert done.exit_code == 2
    assert "cannot be read" in done.output
