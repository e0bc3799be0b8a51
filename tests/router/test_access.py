"""API keys and tenants: who gets in, as whom, and that tenants never share what is cached."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvist_connector.errors import ConfigError
from kvist_router.access.keys import KeyBook
from kvist_router.access.salt import tenant_salt
from kvist_router.access.settings import AuthSettings, TenantSettings
from kvist_router.testing.engine import FakeEngine

CHAT = "/v1/chat/completions"
LONG = list(range(2048))


def line(key: str, *owner: str) -> str:
    return " ".join(("sha256:" + hashlib.sha256(key.encode()).hexdigest(), *owner)) + "\n"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "keys").write_text("# of nobody\n\n" + line("plain") + line("shared", "both"))
    (tmp_path / "red").write_text(line("red-1") + line("red-2"))
    (tmp_path / "blue").write_text(line("blue-1"))
    return tmp_path


def locked(files: Path) -> dict[str, Any]:
    return {
        "auth": {"keys_file": str(files / "keys")},
        "tenant": {"secret_file": str(files / "secret")},
        "tenants": [{"name": name, "keys_file": str(files / name)} for name in ("red", "blue")],
    }


async def status(http: aiohttp.ClientSession, url: str, **headers: str) -> int:
    async with http.post(url + CHAT, json=chat(), headers=headers) as answer:
        return answer.status


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("wrong"), bearer(""), {"Authorization": "Basic cGxhaW4="}, {"Authorization": "plain"}],
)
async def test_without_a_known_key_nothing_is_served(router, http, files, headers) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], **locked(files))
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/x")):
            async with http.request(method, running.url + path, headers=headers) as answer:
                assert answer.status == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                error = (await answer.json())["error"]
                assert error["code"] in ("missing_api_key", "invalid_api_key")
                assert error["type"] == "authentication_error"
        assert engine.received == []
        async with http.get(running.admin_url + "/metrics") as answer:
            assert "kvist_router_unauthorized_total 4.0" in await answer.text()


async def test_probes_need_no_key_and_metrics_are_on_the_admin_port(router, http, files) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], **locked(files))
        for path, expected in (("/healthz", 200), ("/readyz", 200)):
            async with http.get(running.url + path) as answer:
                assert answer.status == expected
        async with http.get(running.url + "/metrics", headers=bearer("plain")) as answer:
            assert answer.status == 404
        async with http.get(running.url + "/v1/models", headers=bearer("plain")) as answer:
            assert answer.status == 200


async def test_keys_reach_no_engine_and_two_of_them_are_refused(router, http, files) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], **locked(files))
        assert await status(http, running.url, **bearer("red-1")) == 200
        assert "authorization" not in engine.received[0].headers
        twice = [("Authorization", "Bearer red-1"), ("Authorization", "Bearer blue-1")]
        async with http.post(running.url + CHAT, json=chat(), headers=twice) as answer:
            assert answer.status == 400


async def test_the_key_says_the_tenant_and_the_client_cannot(router, http, files) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], **locked(files))
        for key, forged in (("red-1", "blue"), ("red-2", "red"), ("blue-1", "red"), ("plain", "red")):
            headers = {**bearer(key), "x-tenant": forged}
            body = chat(cache_salt="forged")
            async with http.post(running.url + CHAT, json=body, headers=headers) as answer:
                assert answer.status == 200
        salts = [json.loads(received.body)["cache_salt"] for received in engine.received]
        assert salts[0] == salts[1]
        assert len(set(salts)) == 3
        assert "forged" not in salts


async def test_tenants_never_hit_each_others_state(router, http, files) -> None:
    async with FakeEngine() as engine:
        engine.tokens = lambda question: LONG
        running = await router(replicas=[{"url": engine.url}], **locked(files))
        reused = []
        for key in ("red-1", "blue-1", "red-2", "shared", "blue-1"):
            async with http.post(running.url + CHAT, json=chat(), headers=bearer(key)) as answer:
                await answer.read()
                reused.append(int(answer.headers["x-kvist-predicted-tokens"]) > 0)
        assert reused == [False, False, True, False, True]


async def test_names_of_tenants_are_whole_or_refused(router, http, files) -> None:
    long = "t" * 300  # what a gateway takes from a certificate or a token may begin alike for all tenants
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], tenant={"secret_file": str(files / "secret")})
        for name in (long + "a", long + "b"):
            assert await status(http, running.url, **{"x-tenant": name}) == 200
        salts = {json.loads(received.body)["cache_salt"] for received in engine.received}
        assert len(salts) == 2
        assert await status(http, running.url, **{"x-tenant": "t" * 513}) == 400


async def test_a_tenant_of_any_letters_is_the_one_that_controls_mean(router, http, files) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], tenant={"secret_file": str(files / "secret")})
        assert await status(http, running.url, **{"x-tenant": "kvist-grön"}) == 200
        salt = json.loads(engine.received[0].body)["cache_salt"]
        assert salt == tenant_salt(b"0123456789abcdef", "kvist-grön")


async def test_tenants_cannot_name_stored_responses(router, http, files) -> None:
    body = {"model": "m", "input": "x", "request_id": "resp_1"}
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], **locked(files))
        async with http.post(running.url + "/v1/responses", json=body, headers=bearer("red-1")) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == "request_id"
        open_to_all = await router(replicas=[{"url": engine.url}])
        async with http.post(open_to_all.url + "/v1/responses", json=body) as answer:
            assert answer.status == 200


async def test_keys_come_and_go_with_their_files(router, http, files, until) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], **locked(files))
        assert await status(http, running.url, **bearer("late")) == 401
        (files / "red").write_text(line("late"))
        while await status(http, running.url, **bearer("late")) != 200:
            pass
        assert await status(http, running.url, **bearer("red-1")) == 401
        assert await status(http, running.url, **bearer("blue-1")) == 200


def test_a_file_that_goes_wrong_leaves_the_keys_and_says_so_once(files, caplog) -> None:
    book = KeyBook(AuthSettings(keys_file=files / "keys"), (), separated=True)
    (files / "keys").write_text("a-key-in-the-clear\n")
    book.look()
    book.look()
    assert book.tenant(b"shared") == "both"
    assert len(caplog.records) == 1
    assert "line 1" in caplog.text
    assert "a-key-in-the-clear" not in caplog.text
    (files / "keys").unlink()
    book.look()
    assert book.tenant(b"plain") == ""
    (files / "keys").write_text(line("new"))
    book.look()
    assert (book.tenant(b"new"), book.tenant(b"plain")) == ("", None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("secret-key\n", "line 1: not `sha256:`"),
        ("sha256:12\n", "line 1: not `sha256:`"),
        (line("a") + line("b", "x y"), "line 2: not `sha256:`"),
        (line("a", "no/name"), "line 1: nothing may follow the hash here: a tenant's name"),
        (line("a", "one") + line("a", "two"), "line 2: this key is another tenant's"),
    ],
)
def test_wrong_files_are_refused_by_line(tmp_path, text, words) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        KeyBook(AuthSettings(keys_file=file), (), separated=True)


def test_what_cannot_be_kept_apart_is_refused_at_the_start(files) -> None:
    with pytest.raises(ConfigError, match="/nowhere cannot be read"):
        KeyBook(AuthSettings(keys_file=Path("/nowhere")), (), separated=True)
    with pytest.raises(ConfigError, match="tenants need it"):
        KeyBook(AuthSettings(keys_file=files / "keys"), (), separated=False)
    (files / "red").write_text(line("red-1", "blue"))
    red = TenantSettings(name="red", keys_file=files / "red")
    with pytest.raises(ConfigError, match="all keys of one tenant"):
        KeyBook(AuthSettings(), (red,), separated=True)
    (files / "red").write_text(line("blue-1"))
    both = (red, TenantSettings(name="blue", keys_file=files / "blue"))
    with pytest.raises(ConfigError, match="another tenant's"):
        KeyBook(AuthSettings(), both, separated=True)
