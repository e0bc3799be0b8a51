"""`kvist` in front of agents and routers that ask for a certificate: it shows one, and checks theirs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from click.testing import Result
from typer.testing import CliRunner

from kvist_cli.app import app
from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.tls import AGENT_NAME
from kvist_router.testing.engine import FakeEngine

KEY = ("--key", "00" * 16)


class Files:
    """Certificates of one authority; the command's own key is in a file of its own."""

    def __init__(self, folder: Path, agents_are: str) -> None:
        authority = trustme.CA()
        self.ca, self.own, self.key = folder / "ca.pem", folder / "own.pem", folder / "own.key"
        authority.cert_pem.write_to_path(str(self.ca))
        own = authority.issue_cert("operator")
        own.cert_chain_pems[0].write_to_path(str(self.own))
        own.private_key_pem.write_to_path(str(self.key))
        self.agent, self.router = folder / "agent.pem", folder / "router.pem"
        authority.issue_cert(agents_are).private_key_and_cert_chain_pem.write_to_path(str(self.agent))
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(self.router))

    @property
    def flags(self) -> tuple[str, ...]:
        return "--ca", str(self.ca), "--client-certificate", str(self.own), "--client-key", str(self.key)

    @property
    def environment(self) -> dict[str, str]:
        names = "KVIST_CA", "KVIST_CLIENT_CERTIFICATE", "KVIST_CLIENT_KEY"
        return dict(zip(names, map(str, (self.ca, self.own, self.key)), strict=True))


@pytest.fixture
def agents_are() -> str:
    return AGENT_NAME


@pytest.fixture
def files(tmp_path: Path, agents_are: str) -> Files:
    return Files(tmp_path, agents_are)


@pytest.fixture
async def agent(tmp_path: Path, files: Files) -> AsyncIterator[str]:
    folder = tmp_path / "agent"
    folder.mkdir()
    tls = {"tls__certificate_file": str(files.agent), "tls__ca_file": str(files.ca)}
    process = await AgentProcess.start(folder, memory="8Mi", **tls)
    yield process.url
    await process.terminate()


async def run(*arguments: str, **env: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env={"COLUMNS": "200", **env})


async def test_agents_are_asked_with_a_certificate_and_theirs_is_checked(agent: str, files: Files) -> None:
    assert agent.startswith("https://")
    asked = ("lookup", *KEY, "--agent", agent, "--json")
    untrusted = await run(*asked)
    assert (untrusted.exit_code, "CERTIFICATE_VERIFY_FAILED" in untrusted.output) == (1, True)
    nobody = await run(*asked, "--ca", str(files.ca))
    assert (nobody.exit_code, "client certificate" in nobody.output) == (1, True)
    assert (await run(*asked, *files.flags)).exit_code == 0
    assert (await run(*asked, **files.environment)).exit_code == 0
    for command in (("stats",), ("status",), ("clear", "--tier", "memory")):
        assert (await run(*command, "--agent", agent, "--json", *files.flags)).exit_code == 0


@pytest.mark.parametrize("agents_are", ["cache.example"])
async def test_agents_may_have_another_name(agent: str, files: Files) -> None:
    asked = ("lookup", *KEY, "--agent", agent, *files.flags)
    wrong = await run(*asked)
    assert (wrong.exit_code, "kvist-agent" in wrong.output) == (1, True)
    assert (await run(*asked, "--tls-name", "cache.example")).exit_code == 0


async def test_a_routers_admin_port_is_asked_with_a_certificate(
    router: Any, files: Files, tmp_path: Path
) -> None:
    tls = {"certificate_file": str(files.router), "client_ca_file": str(files.ca), "admin": True}
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": "m", "prompt": [1, 2, 3]}))
    async with FakeEngine() as engine:
        running = await router(replicas=[{"name": "a", "url": engine.url}], tls=tls)
        at = ("--router", running.admin_url, "--json")
        assert (await run("explain", str(request), *at, "--ca", str(files.ca))).exit_code == 1
        told = await run("explain", str(request), *at, *files.flags)
        assert (told.exit_code, json.loads(told.stdout)["replica"]) == (0, "a")
        told = await run("status", *at, *files.flags)
        found = json.loads(told.stdout)
        assert (found["healthy"], found["hits"]["recorded_requests"]) == (True, 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ca", "nowhere.pem"), "--ca nowhere.pem: cannot be used: No such file"),
        (("--client-certificate", "nowhere.pem"), "--client-certificate nowhere.pem: cannot be used"),
        (("--client-key", "k.pem"), "--client-key is of no use without --client-certificate"),
        (("--ca", __file__), "cannot be used"),
    ],
)
async def test_wrong_files_are_refused_by_their_flag(flags: tuple[str, ...], words: str) -> None:
    done = await run("stats", "--agent", "https://127.0.0.1:1", *flags)
    assert (done.exit_code, words in done.output) == (2, True), done.output
    assert "Traceback" not in done.output
