"""The operator's questions over HTTP to a real router and a real agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import trustme

from kvist_connector.settings import validate
from kvist_connector.testing import services
from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.testing.fake_engine import FakeEngine as FakeVllm
from kvist_connector.testing.fake_engine import prompt_keys
from kvist_connector.tls import AGENT_NAME
from kvist_operator.control.ask import HttpPrograms
from kvist_operator.control.errors import NoAnswer
from kvist_operator.control.pods import Pod
from kvist_operator.control.views import figures, router_view
from kvist_router.app import build
from kvist_router.settings import RouterSettings
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.patience import patient


def pod(url: str, port: str) -> Pod:
    address = urlsplit(url)
    return Pod("pod-0", "uid", address=str(address.hostname), ports={port: int(address.port or 0)})


@pytest.fixture
async def programs() -> AsyncIterator[HttpPrograms]:
    async with aiohttp.ClientSession() as session:
        yield HttpPrograms(session, 30.0)


async def test_a_real_router_says_which_engines_it_knows(programs: HttpPrograms) -> None:
    async with FakeEngine() as engine:
        replica = {"name": "demo-engine-0", "url": engine.url}
        settings = validate(RouterSettings, patient({"port": 0, "admin_port": 0, "replicas": [replica]}))
        async with build(settings) as running:
            task = asyncio.create_task(running.servers.run())
            asked = pod(running.admin_url, "router-admin")
            try:
                async with asyncio.timeout(60):
                    view = await programs.router(asked)
                    while not view.routes("m"):
                        await asyncio.sleep(0.05)
                        view = await programs.router(asked)
            finally:
                running.servers.stop()
                running.servers.stop()
                await task
    assert view.replicas["demo-engine-0"].healthy
    assert not view.mirrors("demo-engine-0")  # it has no agent
    assert not view.routes("other")


async def test_a_real_agent_behind_tls_is_asked_with_the_token_alone(
    programs: HttpPrograms, tmp_path: Path
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert(AGENT_NAME)
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "tls.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "token").write_text("secret")
    agent = await AgentProcess.start(
        tmp_path,
        memory=0,
        http__token_file=tmp_path / "token",
        tls__certificate_file=tmp_path / "tls.pem",
        tls__ca_file=tmp_path / "ca.pem",
        tls__clients="token",
    )
    try:
        asked = replace(pod(agent.url, "agent"), tls=frozenset({"agent"}))
        assert await programs.drain(asked, "secret")
        assert await programs.tiers(asked, "secret") == {}
        with pytest.raises(NoAnswer, match="401"):
            await programs.tiers(asked, "other")
    finally:
        await agent.terminate()


async def test_a_real_agent_drains_and_tells_of_its_tiers(programs: HttpPrograms, tmp_path: Path) -> None:
    agent = await AgentProcess.start(tmp_path, memory=0)
    try:
        asked = pod(agent.url, "agent")
        assert await programs.drain(asked, "")
        assert (await agent.stats())["draining"]
        assert await programs.drain(asked, "", undo=True)
        assert not (await agent.stats())["draining"]
        assert await programs.tiers(asked, "") == {}
    finally:
        await agent.terminate()


async def test_a_token_is_sent(programs: HttpPrograms, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret-of-sixteen-bytes")
    agent = await AgentProcess.start(tmp_path, memory=0, http__token_file=token)
    try:
        asked = pod(agent.url, "agent")
        assert await programs.drain(asked, "secret-of-sixteen-bytes")
        with pytest.raises(NoAnswer, match="401"):
            await programs.drain(asked, "wrong")
    finally:
        await agent.terminate()


@pytest.mark.skipif(bool(services.missing()), reason=services.missing() or "installed")
async def test_real_agents_clear_their_own_tiers_and_one_the_shared_redis(
    programs: HttpPrograms, tmp_path: Path
) -> None:
    redis, keys = services.RedisProcess(tmp_path / "redis"), prompt_keys(range(8 * 4))
    await redis.start()
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    agents = [await AgentProcess.start(folder, redis__urls=redis.url) for folder in folders]
    first, second = (pod(agent.url, "agent") for agent in agents)
    try:
        engine = await FakeVllm.start(agents[0].socket)
        await engine.store(keys)
        await engine.lookup(keys)
        await agents[0].post("/v1/kvist/flush", {"deadline": 60.0})
        await engine.stop()
        with pytest.raises(NoAnswer, match="has not met its engine"):
            await programs.clear(second, "", 60.0, shared=True)
        assert await programs.clear(second, "", 60.0, shared=False) == {"memory": 0}
        assert await programs.clear(first, "", 60.0, shared=False) == {"memory": len(keys)}
        assert await programs.clear(first, "", 60.0, shared=True) == {"redis": len(keys)}
        assert await programs.clear(first, "", 60.0, shared=True) == {"redis": 0}
        await redis.kill()
        with pytest.raises(NoAnswer, match="HTTP 503"):
            await programs.clear(first, "", 60.0, shared=True)
    finally:
        for agent in agents:
            await agent.kill()
        await redis.kill()


async def test_what_does_not_answer_is_told_so() -> None:
    async with aiohttp.ClientSession() as session:
        programs = HttpPrograms(session, 0.5)
        with pytest.raises(NoAnswer, match="no address"):
            await programs.router(Pod("new", "uid"))
        with pytest.raises(NoAnswer, match=r"GET http://127\.0\.0\.1:1/"):
            await programs.router(Pod("shut", "uid", address="127.0.0.1", ports={"router-admin": 1}))


@pytest.mark.parametrize("answer", [{}, {"replicas": [1]}, {"replicas": [{"name": "a"}]}, [], None])
def test_an_answer_that_is_no_routers_is_refused(answer: Any) -> None:
    with pytest.raises(NoAnswer):
        router_view(answer, "")


def test_figures_are_summed_over_tiers_and_what_is_missing_is_zero() -> None:
    text = (
        'kvist_router_hit_tokens_total{tier="gpu"} 3.0\nkvist_router_hit_tokens_total{tier="memory"} 4.0\n'
        "kvist_router_recorded_requests_total 2.0\n"
    )
    found = figures(text)
    assert (found.hit_tokens, found.requests, found.saved_seconds) == (7.0, 2.0, 0.0)
    with pytest.raises(NoAnswer):
        figures("not { metrics")
