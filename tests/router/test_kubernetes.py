"""A router in Kubernetes: replicas from endpoints, and a stop that loses no request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvist_connector.errors import ConfigError
from kvist_connector.settings import validate
from kvist_router.app import Running, build
from kvist_router.mind.interface import Decision, Metadata
from kvist_router.settings import RouterSettings
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.kubernetes import FakeKubernetes

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
SECONDS = 60


def pod(name: str, engine: FakeEngine, **conditions: bool) -> dict[str, Any]:
    """A slice with one pod: ports belong to slices."""
    return {
        "metadata": {"name": f"pool-{name}", "labels": {"kubernetes.io/service-name": "pool"}},
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": ["127.0.0.1"],
                "conditions": {"ready": True, "serving": True, "terminating": False, **conditions},
                "targetRef": {"kind": "Pod", "name": name},
            }
        ],
        "ports": [{"name": "engine", "port": int(engine.url.rsplit(":", 1)[1])}],
    }


@pytest.fixture
async def api() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as server:
        yield server


def discovery(server: FakeKubernetes) -> dict[str, Any]:
    where = {"server": server.url, "token_file": None, "ca_file": None}
    return {"kubernetes": {"service": "pool", "namespace": "here", **where}}


async def chosen(running: Running) -> str:
    decision = await running.mind.decide(BODY, Metadata("chat"))
    assert isinstance(decision, Decision), decision
    return decision.replica


async def test_pods_are_replicas_and_their_conditions_count(router, api, until, http) -> None:
    async with FakeEngine() as first, FakeEngine() as second:
        await api.put("here", pod("engine-0", first))
        await api.put("here", pod("engine-1", second, serving=False))
        running = await router(ready=False, **discovery(api))
        replicas = running.mind.replicas
        await until(lambda: len(replicas) == 2 and all(item.healthy for item in replicas.values()))
        assert {await chosen(running) for _ in range(4)} == {"engine-0"}  # engine-1 is followed, not chosen
        kept = replicas["engine-1"]
        await api.put("here", pod("engine-1", second))
        await until(lambda: kept.listed_ready)
        assert replicas["engine-1"] is kept  # with all that was mirrored
        await api.put("here", pod("engine-0", first, ready=False, terminating=True))
        await until(lambda: replicas["engine-0"].draining)
        assert {await chosen(running) for _ in range(4)} == {"engine-1"}
        async with http.get(running.admin_url + "/v1/kvist/replicas") as answer:
            states = {item["name"]: item for item in (await answer.json())["replicas"]}
        assert states["engine-0"]["terminating"]
        await api.drop("here", "pool-engine-0")
        await until(lambda: list(replicas) == ["engine-1"])


async def test_a_router_is_ready_before_its_replicas_are_since_their_gate_waits_for_it(
    router, api, until, http
) -> None:
    async with FakeEngine() as engine:
        await api.put("here", pod("engine-0", engine, serving=False))
        running = await router(ready=False, **discovery(api))
        replicas = running.mind.replicas
        await until(lambda: bool(replicas) and replicas["engine-0"].healthy)
        async with http.get(running.url + "/readyz") as answer:
            assert answer.status == 200


async def test_readyz_says_what_the_api_server_says(router, api, http, until) -> None:
    api.refuse = 403
    running = await router(ready=False, **discovery(api))
    reason = ""
    while "get, list and watch endpointslices" not in reason:
        async with http.get(running.url + "/readyz") as answer:
            assert answer.status == 503
            reason = (await answer.json())["reason"]


async def test_outside_of_a_pod_the_api_server_must_be_given(monkeypatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    values = {"port": 0, "admin_port": 0, "kubernetes": {"service": "pool", "namespace": "here"}}
    with pytest.raises(ConfigError, match=r"kubernetes\.server"):
        async with build(validate(RouterSettings, values)):
            pass


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kubernetes": {"service": "pool"}, "replicas_file": "f.yaml"}, "from one place"),
        ({"kubernetes": {"service": "Pool"}}, "kubernetes.service: 'Pool' is not valid"),
        ({"kubernetes": {"servce": "pool"}}, "did you mean 'service'"),
        ({"kubernetes": {"service": "p", "server": "h"}}, "is not an http:// or https:// URL"),
    ],
)
def test_wrong_settings_are_refused_in_words(values, words) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(RouterSettings, values)
    assert words in str(refused.value)


def test_the_grace_time_is_zero_but_in_kubernetes() -> None:
    replicas = {"replicas": [{"url": "http://h:1"}]}
    assert validate(RouterSettings, replicas).grace_seconds == 0
    assert validate(RouterSettings, {"kubernetes": {"service": "pool"}}).grace_seconds == 10
    given = {"kubernetes": {"service": "pool"}, "limits": {"grace_seconds": 3}}
    assert validate(RouterSettings, given).grace_seconds == 3


# ---- the end


async def test_a_stopping_router_is_not_ready_and_takes_requests_until_the_grace_is_over(http) -> None:
    async with FakeEngine() as engine:
        values = {
            "port": 0, "admin_port": 0, "replicas": [{"url": engine.url}],
            "limits": {"grace_seconds": 3600}, "health": {"interval_seconds": 0.05, "timeout_seconds": 60},
        }  # fmt: skip
        async with build(validate(RouterSettings, values)) as running:
            serving = asyncio.create_task(running.servers.run())
            while (await http.get(running.url + "/readyz")).status != 200:
                pass
            running.servers.stop()
            async with http.get(running.url + "/readyz") as answer:
                assert answer.status == 503
                assert (await answer.json())["reason"] == "the router is stopping"
            engine.first_byte.clear()
            late = asyncio.create_task(http.post(running.url + "/v1/chat/completions", data=BODY))
            await engine.wait_received(1)
            running.servers.stop()  # the grace is over
            engine.first_byte.set()
            async with await late as answer:
                assert answer.status == 200
                await answer.read()
            await asyncio.wait_for(serving, SECONDS)
