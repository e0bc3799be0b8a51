"""The router's log: one line for a request, for people and for machines, without prompts."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from kvist_router.logs import FIELDS, JsonFormatter, TextFormatter
from kvist_router.testing.engine import FakeEngine

URL = "/v1/chat/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "my secret prompt"}], **fields}


@pytest.fixture
def lines(caplog):
    """What was said of requests."""
    caplog.set_level(logging.INFO)

    def found() -> list[dict[str, Any]]:
        return [getattr(item, FIELDS) for item in caplog.records if item.name == "kvist.requests"]

    return found


async def test_each_request_gets_a_line_that_its_answers_id_finds(router, http, lines, caplog) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"name": "r", "url": engine.url}], log={"requests": True})
        headers = {"x-tenant": "red"}
        async with http.post(running.url + URL, json=chat(stream=True), headers=headers) as answer:
            await answer.read()
        async with http.get(running.url + "/healthz"):
            pass
        async with http.post(running.url + URL, json={"model": "m"}) as refused:
            assert refused.status == 400
        first, second = lines()
        assert first["request"] == answer.headers["x-kvist-request-id"]
        assert (first["status"], first["whole"], first["tenant"], first["replica"]) == (200, True, "red", "r")
        assert 0 <= first["first_byte_seconds"] <= first["seconds"]
        assert first["client"] == "127.0.0.1"
        assert (second["status"], second["request"], second["replica"]) == (400, "", "")
        assert "secret" not in caplog.text
        assert "secret" not in str(lines())


async def test_bodies_are_there_only_when_switched_on(router, http, lines) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], log={"requests": True, "bodies": True})
        async with http.post(running.url + URL, json=chat(x="y" * 50_000)) as answer:
            await answer.read()
        (line,) = lines()
        assert "my secret prompt" in line["body"]
        assert len(line["body"]) == 16_384
        assert len(engine.received[0].body) > 50_000


async def test_without_the_setting_requests_are_not_logged(router, http, lines, caplog) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}])
        async with http.post(running.url + URL, json=chat()) as answer:
            await answer.read()
        assert lines() == []
        assert "secret" not in caplog.text


def record(**fields: Any) -> logging.LogRecord:
    values = {"name": "kvist.requests", "levelno": 20, "levelname": "INFO", "msg": "a %s", "args": ("line",)}
    return logging.makeLogRecord({**values, FIELDS: fields})


def test_json_lines_hold_the_fields_beside_the_message() -> None:
    line = json.loads(JsonFormatter().format(record(request="1", status=200, tenant="é\n")))
    assert (line["message"], line["level"], line["logger"]) == ("a line", "info", "kvist.requests")
    assert (line["request"], line["status"], line["tenant"]) == ("1", 200, "é\n")
    assert line["time"].endswith("Z")


def test_a_trace_is_one_line_too() -> None:
    try:
        raise ValueError("a fault")
    except ValueError as error:
        wrong = record()
        wrong.exc_info = (type(error), error, error.__traceback__)
    text = JsonFormatter().format(wrong)
    assert "\n" not in text
    assert "a fault" in json.loads(text)["trace"]


def test_lines_for_people_end_with_the_fields() -> None:
    text = TextFormatter().format(record(status=200, tenant="a b\n"))
    assert text.endswith('kvist.requests: a line status=200 tenant="a b\\n"')
    assert TextFormatter().format(record()).endswith("a line")
