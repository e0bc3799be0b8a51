"""TLS with certificates on both sides: routers to agents, agents to peers; files may change meanwhile."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from kvist_connector.errors import ConfigError
from kvist_connector.protocol.tiers import Tier
from kvist_connector.settings import validate
from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.testing.fake_engine import FakeEngine as EngineHalf
from kvist_connector.testing.fake_engine import prompt_keys
from kvist_connector.testing.ports import free_ports
from kvist_connector.tls import AGENT_NAME, LiveContext, MutualTls
from kvist_router.mind.interface import Decision, Metadata, Report
from kvist_router.testing.engine import FakeEngine

KEYS = prompt_keys(range(8 * 24))
STATS, LOOKUP = "/v1/kvist/stats", "/v1/kvist/lookup"


def written(folder: Path, authority: trustme.CA, name: str = AGENT_NAME) -> dict[str, str]:
    """Settings of one side, whose files are in the folder."""
    folder.mkdir(exist_ok=True)
    certificate = authority.issue_cert(name)
    certificate.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    certificate.private_key_pem.write_to_path(folder / "tls.key")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    return {
        "certificate_file": str(folder / "tls.crt"),
        "key_file": str(folder / "tls.key"),
        "ca_file": str(folder / "ca.crt"),
    }


def flags(tls: dict[str, str]) -> dict[str, str]:
    return {f"tls__{name}": value for name, value in tls.items()}


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def start(tmp_path):
    """Starts agents that are gone at the end of the test."""
    running = []

    async def begin(**settings: object) -> AgentProcess:
        folder = tmp_path / f"agent{len(running)}"
        folder.mkdir()
        running.append(await AgentProcess.start(folder, **settings))
        return running[-1]

    yield begin
    for agent in running:
        await agent.terminate()


async def test_a_router_reads_the_feed_of_an_agent_that_asks_for_a_certificate(
    router, until, start, authority, tmp_path
) -> None:
    agent = await start(**flags(written(tmp_path / "a", authority)))
    assert agent.url.startswith("https://")
    half = await EngineHalf.start(agent.socket)
    tls = written(tmp_path / "r", authority, "router")
    async with FakeEngine() as engine:
        listed = [{"name": "a", "url": engine.url, "agent": agent.url}]
        running = await router(replicas=listed, agent={"tls": tls}, ready=False)
        await half.store(KEYS)
        await until(lambda: "a" in running.mind.replicas)
        await until(lambda: running.mind.replicas["a"].mirror.has(KEYS[-1]))
        async with (
            aiohttp.ClientSession() as client,
            client.post(running.admin_url + LOOKUP, json={"all": True}) as answer,
        ):
            assert (await answer.json())["replicas"]["a"]["hit_chunks"] == len(KEYS)
    await half.stop()


async def test_who_has_no_certificate_sees_figures_and_nothing_else(start, authority, tmp_path) -> None:
    agent = await start(**flags(written(tmp_path / "a", authority)))
    stranger = trustme.CA()
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    trusting.check_hostname = False
    false = ssl.create_default_context()
    authority.configure_trust(false)
    false.check_hostname = False
    stranger.issue_cert("router").configure_cert(false)
    async with aiohttp.ClientSession() as client:
        for path in ("/healthz", "/metrics", STATS):
            async with client.get(agent.url + path, ssl=trusting) as answer:
                assert answer.status == 200
        async with client.post(agent.url + LOOKUP, json={"all": True}, ssl=trusting) as answer:
            assert answer.status == 401
            assert "client certificate" in (await answer.json())["error"]["message"]
        with pytest.raises((aiohttp.ClientError, OSError)):
            await client.post(agent.url + LOOKUP, json={"all": True}, ssl=false)


async def test_an_agent_of_another_authority_or_name_is_not_believed(
    router, until, start, authority, tmp_path
) -> None:
    listed, engine = [], FakeEngine()
    async with engine:
        for number, (issuer, name) in enumerate(((trustme.CA(), AGENT_NAME), (authority, "other"))):
            tls = written(tmp_path / f"a{number}", issuer, name) | {"ca_file": str(tmp_path / "ca.pem")}
            authority.cert_pem.write_to_path(tmp_path / "ca.pem")
            agent = await start(**flags(tls))
            listed.append({"name": f"a{number}", "url": engine.url, "agent": agent.url})
        own = written(tmp_path / "r", authority, "router")
        running = await router(replicas=listed, agent={"tls": own}, ready=False)
        await until(lambda: len(running.mind.replicas) == 2)
        for replica in running.mind.replicas.values():
            await until(lambda replica=replica: "ertificate" in replica.feed_problem)


async def test_peers_read_each_other_under_tls(start, authority, tmp_path) -> None:
    tls = flags(written(tmp_path / "tls", authority))
    first = await start(peer__host="127.0.0.1", peer__port=0, memory="4Mi", **tls)
    writer = await EngineHalf.start(first.socket)
    await writer.store(KEYS[:24])
    await writer.lookup(KEYS[:24])
    (url,) = (line.split("peer=")[1].split()[0] for line in [first.announced] if "peer=" in line)
    second = await start(peer__urls=url.replace("https://", "http://"), memory="4Mi", **tls)
    reader = await EngineHalf.start(second.socket)
    found = await reader.lookup(KEYS[:24])  # several at a time, each whole
    assert found.tiers == bytes([Tier.PEER] * 24)
    assert reader.holds(KEYS[:24], found)
    third = await start(peer__urls=url.replace("https://", "http://"))  # without a certificate
    outsider = await EngineHalf.start(third.socket)
    assert not (await outsider.lookup(KEYS[:6])).refs
    for half in (writer, reader, outsider):
        await half.stop()


async def test_routers_tell_each_other_under_tls_what_they_send(
    router, http, until, authority, tmp_path
) -> None:
    agent = {"tls": written(tmp_path / "r", authority)}
    ports = free_ports(2)
    urls = [f"https://localhost:{port}" for port in ports]
    async with FakeEngine() as engine:
        listed = [{"name": "e", "url": engine.url}]
        first, second = [
            await router(replicas=listed, agent=agent, neighbours={"port": port, "urls": urls})
            for port in ports
        ]
        await until(lambda: first.mind.unheard() == second.mind.unheard() == 0)
        body = b'{"model": "m", "prompt": "hello"}'
        decision = await first.mind.decide(body, Metadata("completions"))
        assert isinstance(decision, Decision)
        await until(lambda: second.mind.replicas["e"].elsewhere.requests == 1)
        await first.mind.report(decision.id, Report("ended"))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    trusting.check_hostname = False
    async with http.get(f"{urls[0]}/v1/kvist/dispatches", ssl=trusting) as answer:
        assert answer.status == 401


def test_new_files_are_taken_and_wrong_ones_are_not(authority, tmp_path, caplog) -> None:
    files = validate(MutualTls, written(tmp_path / "a", authority))
    live = LiveContext("client", files, "tls")
    before = live()
    assert live() is before
    other = trustme.CA()
    written(tmp_path / "a", other)
    after = live()
    assert after is not before
    issuers = [dict(pair[0] for pair in found["issuer"]) for found in after.get_ca_certs()]
    assert len(issuers) == 1
    (tmp_path / "a" / "ca.crt").write_text("no certificate")
    assert live() is after
    assert "tls.ca_file" in caplog.text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"certificate_file": "a.pem"}, "certificate_file and ca_file belong together"),
        ({"ca_file": "a.pem"}, "certificate_file and ca_file belong together"),
        ({"key_file": "a.pem"}, "key_file is of no use without certificate_file"),
    ],
)
def test_half_of_the_files_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        validate(MutualTls, given)
