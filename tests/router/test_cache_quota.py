"""What a router tells engines of a tenant's share of their caches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvist_connector.errors import ConfigError
from kvist_connector.settings import validate
from kvist_router.access.quota import CacheQuotas
from kvist_router.access.settings import ShareSettings, TenantSettings
from kvist_router.settings import RouterSettings
from kvist_router.testing.engine import FakeEngine

CHAT = "/v1/chat/completions"


@pytest.fixture
def settings(tmp_path) -> dict[str, Any]:
    (tmp_path / "secret").write_text("s" * 32)
    return {
        "tenant": {"secret_file": str(tmp_path / "secret"), "header": "x-tenant"},
        "tenants": [{"name": "red", "cache_tokens": 1000}, {"name": "blue"}],
    }


async def sent(router, http, settings: dict[str, Any], tenant: str, **fields: Any) -> dict[str, Any]:
    """The body that reaches the engine."""
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], **settings)
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
        async with http.post(running.url + CHAT, json=body, headers={"x-tenant": tenant}) as answer:
            assert answer.status == 200
        found: dict[str, Any] = json.loads(engine.received[-1].body)
        return found


async def test_requests_of_a_tenant_with_a_quota_carry_it(router, http, settings) -> None:
    body = await sent(router, http, settings, "red", kvist={"tags": ["mine"]})
    assert body["kv_transfer_params"] == {"tags": ["mine", "tenant:red", "quota:1000"]}
    assert "kvist" not in body


async def test_without_a_quota_nothing_is_added(router, http, settings) -> None:
    assert "kv_transfer_params" not in await sent(router, http, settings, "blue")


@pytest.mark.parametrize("tag", ["tenant:blue", "quota:1000000"])
async def test_a_client_cannot_say_it(router, http, settings, tag: str) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], **settings)
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "kvist": {"tags": [tag]}}
        async with http.post(running.url + CHAT, json=body, headers={"x-tenant": "red"}) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == "kvist.tags"
        assert not engine.received


async def test_a_new_quota_holds_from_the_next_request(router, http, settings) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], **settings)
        others = {**settings["tenant"], "others": {"cache_tokens": 7}}
        changed = {**settings, "tenants": [], "tenant": others, "replicas": [{"url": engine.url}]}
        running.mind.use(validate(RouterSettings, changed))
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        async with http.post(running.url + CHAT, json=body, headers={"x-tenant": "red"}) as answer:
            assert answer.status == 200
        tags = json.loads(engine.received[-1].body)["kv_transfer_params"]["tags"]
        assert tags == ["tenant:red", "quota:7"]


def test_a_quota_needs_tenants_that_are_kept_apart() -> None:
    given = {"replicas": [{"url": "http://a"}], "tenants": [{"name": "red", "cache_tokens": 1}]}
    with pytest.raises(ConfigError, match=r"cache_tokens needs tenant\.secret_file"):
        validate(RouterSettings, given)


def test_a_gateways_long_name_becomes_a_tag_that_fits() -> None:
    quotas = CacheQuotas([TenantSettings(name="a")], ShareSettings(cache_tokens=0))
    tenant, quota = quotas.tags("x" * 5000)
    assert len(tenant) < 64
    assert quota == "quota:0"
    assert quotas.tags("x" * 5001)[0] != tenant
    assert quotas.tags("a") == ()
