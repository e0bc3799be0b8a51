"""Long bodies pass through a file: the same bytes, edits included, in bounded memory and disk."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kvist_router.relay.edits import edit_body
from kvist_router.relay.skim import Skimmer, TooMuchError
from kvist_router.testing.engine import FakeEngine

CHAT = "/v1/chat/completions"
MEMORY = 2**16  # of one body, in the tests below
MOST = 2**28


def picture(size: int) -> bytes:
    return b"data:image/png;base64," + b"iVBORw0K" * (size // 8)


def body(size: int, more: str = "") -> bytes:
    head = f'{{"model": "m", {more}"messages": [{{"role": "user", "content": [{{"type": "image_url", '
    return head.encode() + b'"image_url": {"url": "' + picture(size) + b'"}}]}], "n" : 1}'


def feed(skimmer: Skimmer, piece: bytes) -> None:
    for _ in range(500):
        skimmer.feed(piece)


# ---- skimming


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=40)
    | st.sampled_from(["\\" * 9, '"' * 9, "a" * 50]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=20), json_values, min_size=1), st.integers(1, 30), st.booleans())
def test_what_was_cut_comes_back_wherever_pieces_end(
    value: dict[str, Any], step: int, ascii_only: bool
) -> None:
    whole = json.dumps(value, ensure_ascii=ascii_only).encode()
    skimmer = Skimmer(most=10**6, long_string=16)
    for begin in range(0, len(whole), step):
        skimmer.feed(whole[begin : begin + step])
    text = skimmer.text()
    json.loads(text)  # still JSON
    back = b"".join(
        part if isinstance(part, bytes) else whole[part[0] : part[1]] for part in skimmer.expand(text)
    )
    assert back == whole


def test_only_long_strings_are_cut_and_edits_leave_their_marks() -> None:
    whole = body(2**21, '"kvist": {"tags": ["a"]}, ')
    skimmer = Skimmer(most=MEMORY)
    skimmer.feed(whole)
    text = skimmer.text()
    assert len(text) < 400
    edited = edit_body(text, ("a",), "salt")
    assert edited is not None
    back = b"".join(
        part if isinstance(part, bytes) else whole[part[0] : part[1]] for part in skimmer.expand(edited)
    )
    found = json.loads(back)
    assert (found["cache_salt"], found["kv_transfer_params"]) == ("salt", {"tags": ["a"]})
    assert found["messages"] == json.loads(whole)["messages"]


def test_a_member_that_is_dropped_takes_its_long_strings_with_it() -> None:
    whole = b'{"cache_salt": "' + b"s" * 50 + b'", "prompt": "' + b"p" * 50 + b'"}'
    skimmer = Skimmer(most=MEMORY, long_string=16)
    skimmer.feed(whole)
    edited = edit_body(skimmer.text(), None, "ours")
    assert edited is not None
    parts = list(skimmer.expand(edited))
    assert [part for part in parts if not isinstance(part, bytes)] == [
        (whole.index(b"p" * 50), len(whole) - 2)
    ]


@pytest.mark.parametrize("piece", [b'"",' * 999, b"[" * 999, b'"' + b"\\u0061" * 10 + b'",'])
def test_what_is_long_without_long_strings_is_too_much(piece: bytes) -> None:
    skimmer = Skimmer(most=4096)
    with pytest.raises(TooMuchError):
        feed(skimmer, piece)


# ---- through the router


async def test_a_long_body_arrives_as_it_was_sent(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(
            replicas=[{"url": engine.url}], limits={"body_bytes": MOST, "body_memory_bytes": MEMORY}
        )
        for size in (1000, 2**20 + 10, 2**24):
            sent = body(size)
            async with http.post(running.url + CHAT, data=io.BytesIO(sent)) as answer:
                assert answer.status == 200, await answer.text()
            assert engine.received[-1].body == sent
        assert running.mind.records.latest(1)[0].tokens_from == "unknown"
        assert running.mind.records.latest(1)[0].prompt_tokens < 1100  # one picture, not its bytes


async def test_edits_are_made_in_a_long_body_too(router, http, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123")
    async with FakeEngine() as engine:
        running = await router(
            replicas=[{"url": engine.url}],
            tenant={"secret_file": str(secret)},
            limits={"body_bytes": MOST, "body_memory_bytes": MEMORY},
        )
        async with http.post(
            running.url + CHAT, data=io.BytesIO(body(2**22, '"kvist": {"tags": ["a"]}, '))
        ) as answer:
            assert answer.status == 200, await answer.text()
        found = json.loads(engine.received[-1].body)
        assert len(found["cache_salt"]) == 64
        assert found["kv_transfer_params"] == {"tags": ["a"]}
        assert found["messages"][0]["content"][0]["image_url"]["url"].encode() == picture(2**22)


async def test_a_long_body_is_sent_again_to_another_replica(router, http) -> None:
    async def fails(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500)

    async with FakeEngine() as broken, FakeEngine() as whole:
        broken.answer = fails
        running = await router(
            replicas=[{"name": "r0", "url": broken.url}, {"name": "r1", "url": whole.url}],
            policy="round-robin",
            limits={"body_bytes": MOST, "body_memory_bytes": MEMORY},
        )
        sent = body(2**23)
        async with http.post(running.url + CHAT, data=io.BytesIO(sent)) as answer:
            assert (answer.status, answer.headers["x-kvist-replica"]) == (200, "r1")
        assert broken.received[0].body == whole.received[0].body == sent


async def test_an_engine_may_answer_before_it_has_all_of_a_long_body(router, http, until) -> None:
    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            answer = b'{"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 9999}]}'
            writer.write(
                b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
                % (len(answer), answer)
            )
        else:
            writer.write(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\n{}")
            await ended.wait()
        writer.close()

    ended = asyncio.Event()
    server = await asyncio.start_server(refuses, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        running = await router(
            replicas=[{"url": url}], limits={"body_bytes": MOST, "body_memory_bytes": MEMORY}
        )
        async with http.post(running.url + CHAT, data=io.BytesIO(body(2**25))) as answer:
            assert answer.status == 413
            assert await answer.read() == b"{}"
        await until(lambda: len(running.mind.in_flight) == 0)
        ended.set()


@pytest.mark.parametrize(
    ("limits", "sent", "status", "code"),
    [
        ({"body_bytes": 2**20}, body(2**21), 413, "body_too_long"),
        ({}, b'{"model": "m", "prompt": [' + b"1," * 2**17 + b"1]}", 413, "body_too_long"),
        ({"spool_bytes": 2**20}, body(2**21), 503, "overloaded"),
        ({}, body(2**21)[:-1], 400, "invalid_json"),
        ({}, body(2**21, '"model": "m", '), 400, "duplicate_key"),
        ({}, body(2**21, '"kv_transfer_params": {"a": 1}, '), 400, None),
    ],
)
async def test_refusals_of_long_bodies(
    router, http, until, limits, sent: bytes, status: int, code: str
) -> None:
    async def pieces() -> Any:
        for begin in range(0, len(sent), 2**16):
            yield sent[begin : begin + 2**16]

    async with FakeEngine() as engine:
        running = await router(
            replicas=[{"url": engine.url}], limits={"body_bytes": MOST, "body_memory_bytes": MEMORY, **limits}
        )
        for data in (io.BytesIO(sent), pieces()):
            async with http.post(running.url + CHAT, data=data) as answer:
                assert answer.status == status, await answer.text()
                assert (await answer.json())["error"]["code"] == code
        assert not engine.received
        small = b'{"model": "m", "prompt": "x"}'  # nothing is still taken
        async with http.post(running.url + "/v1/completions", data=small) as answer:
            assert answer.status == 200


async def test_without_a_folder_for_files_long_bodies_are_refused_and_others_served(
    router, http, monkeypatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    async with FakeEngine() as engine:
        running = await router(
            replicas=[{"url": engine.url}], limits={"body_bytes": MOST, "body_memory_bytes": MEMORY}
        )
        with monkeypatch.context() as patched:
            patched.setattr("tempfile.TemporaryFile", full)
            async with http.post(running.url + CHAT, data=io.BytesIO(body(2**21))) as answer:
                assert answer.status == 503
            async with http.post(running.url + CHAT, data=io.BytesIO(body(1000))) as answer:
                assert answer.status == 200
        async with http.post(running.url + CHAT, data=io.BytesIO(body(2**21))) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("limits", "sent"),
    [({"spool_bytes": 3 * 2**20}, body(2**21)), ({"bodies_memory_bytes": 2**20}, body(60_000, '"a": "x", '))],
)
async def test_room_is_given_back_when_requests_end(router, http, until, limits, sent: bytes) -> None:
    most = {"body_bytes": MOST, "body_memory_bytes": MEMORY, **limits}
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], limits=most)
        for _ in range(20):
            async with http.post(running.url + CHAT, data=io.BytesIO(sent)) as answer:
                assert answer.status == 200, await answer.text()
        engine.first_byte.clear()
        tasks = [asyncio.create_task(post(http, running.url, sent)) for _ in range(20)]
        await until(lambda: sum(task.done() for task in tasks) > 0)  # one that found no room
        engine.first_byte.set()
        found = await asyncio.gather(*tasks)
        assert set(found) == {200, 503}
        assert await post(http, running.url, sent) == 200


async def post(http: Any, url: str, sent: bytes) -> int:
    async with http.post(url + CHAT, data=io.BytesIO(sent)) as answer:
        await answer.read()
        return int(answer.status)
