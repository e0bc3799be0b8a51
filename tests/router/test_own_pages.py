"""The router's own pages: one form of errors on both ports, and why it is not ready."""

from __future__ import annotations

import pytest

from kvist_router.testing.engine import FakeEngine

FORM = {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/nowhere", 404, "/v1/kvist/decisions"),
        ("POST", "/v1/kvist/replicas", 405, "GET"),
        ("GET", "/v1/kvist/decisions?limit=0", 422, "limit: '0' is not valid"),
        ("GET", "/v1/kvist/decisions?limit=many", 422, "limit: 'many' is not valid"),
        ("GET", "/v1/kvist/decisions/nobody", 404, "no decision of this id"),
    ],
)
async def test_errors_of_the_admin_port_have_openais_form(router, http, method, path, status, words) -> None:
    running = await router(ready=False, replicas=[{"url": "http://127.0.0.1:9"}])
    async with http.request(method, running.admin_url + path) as answer:
        assert answer.status == status
        assert answer.content_type == "application/json"
        error = (await answer.json())["error"]
    assert set(error) == FORM
    assert words in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("POST", "/v1/models", 405)]
)
async def test_errors_of_the_endpoint_too(router, http, method, path, status) -> None:
    running = await router(ready=False, replicas=[{"url": "http://127.0.0.1:9"}])
    async with http.request(method, running.url + path) as answer:
        assert answer.status == status
        assert set((await answer.json())["error"]) == FORM


async def test_a_missing_replicas_file_is_said_by_readyz_and_the_log(
    router, until, http, tmp_path, caplog
) -> None:
    file = tmp_path / "replicas.yaml"
    running = await router(ready=False, replicas_file=str(file))
    reason = ""
    while "does not exist" not in reason:
        async with http.get(running.url + "/readyz") as answer:
            assert answer.status == 503
            reason = (await answer.json())["reason"]
    assert str(file) in reason
    assert "does not exist" in caplog.text
    async with FakeEngine() as engine:
        file.with_suffix(".new").write_text(f"- {{name: a, url: '{engine.url}'}}")
        file.with_suffix(".new").rename(file)
        await until(lambda: "a" in running.mind.replicas and running.mind.replicas["a"].healthy)
        async with http.get(running.url + "/readyz") as answer:
            assert answer.status == 200


async def test_replicas_of_the_settings_do_not_wait_for_the_file(router, until, tmp_path) -> None:
    async with FakeEngine() as engine:
        fixed = [{"name": "a", "url": engine.url}]
        running = await router(ready=False, replicas=fixed, replicas_file=str(tmp_path / "none.yaml"))
        await until(lambda: "a" in running.mind.replicas and running.mind.replicas["a"].healthy)
