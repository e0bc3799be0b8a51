"""Routers of one cluster tell each other what they have sent; who is not heard only widens the tie band."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector import names
from kvist_connector.errors import ConfigError
from kvist_connector.protocol.framing import FrameDecoder, FrameError, encode
from kvist_connector.settings import validate
from kvist_connector.testing.ports import free_ports
from kvist_router.errors import FeedError
from kvist_router.mind.inflight import InFlight, InFlightMap
from kvist_router.mind.interface import Decision, Metadata, Report
from kvist_router.mind.neighbours.circle import changes
from kvist_router.mind.neighbours.known import Known
from kvist_router.mind.neighbours.messages import (
    MAX_KEYS,
    MAX_NAME,
    VERSION,
    Beat,
    Dispatched,
    Ended,
    Opening,
    Prefilled,
    Said,
    check,
)
from kvist_router.mind.neighbours.publisher import BUFFER_BYTES, Listener, Publisher
from kvist_router.mind.neighbours.settings import MAX_NEIGHBOURS
from kvist_router.mind.replica import Replica
from kvist_router.settings import IndexSettings, ReplicaSettings, RouterSettings
from kvist_router.testing.engine import FakeEngine

COMPLETIONS = Metadata("completions")
TOKENS = list(range(1000, 1000 + 4 * 256 + 100))
NAMES = st.text(max_size=MAX_NAME)
KEYS = st.lists(st.binary(min_size=16, max_size=16), max_size=5, unique=True)


@st.composite
def dispatches(draw: st.DrawFn) -> Dispatched:
    keys = draw(KEYS)
    return Dispatched(
        request=draw(NAMES), replica=draw(st.sampled_from(["a", "b", "gone"])),
        tokens=draw(st.integers(0, 10**6)), ready=draw(st.floats(0, 100)), keys=b"".join(keys),
        held=draw(st.integers(0, len(keys))),
    )  # fmt: skip


MESSAGES = st.one_of(
    dispatches(),
    st.builds(Opening, version=st.just(VERSION), router=NAMES, instance=st.binary(max_size=20)),
    st.builds(Prefilled, request=NAMES),
    st.builds(Ended, request=NAMES),
    st.just(Beat()),
)


def replica(name: str) -> Replica:
    return Replica(ReplicaSettings(name=name, url=f"http://{name}"), IndexSettings())


def figures(item: Replica) -> tuple[int, int, int]:
    return item.elsewhere.tokens, item.elsewhere.prefills, item.elsewhere.requests


@given(st.lists(MESSAGES, max_size=8), st.data())
def test_what_is_said_arrives_however_it_is_cut(messages: list[Said], data: st.DataObject) -> None:
    stream, decoder, found = b"".join(map(encode, messages)), FrameDecoder[Said](Said), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += list(decoder.feed(stream[:size]))
        stream = stream[size:]
    assert found == messages
    for message in found:
        check(message)


@given(st.binary(max_size=200))
def test_bytes_of_no_router_end_the_connection(data: bytes) -> None:
    try:
        for message in FrameDecoder[Said](Said).feed(data):
            check(message)
    except (FrameError, FeedError):
        pass


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"keys": b"short"}, "bytes of keys"),
        ({"keys": bytes(16 * (MAX_KEYS + 1))}, "bytes of keys"),
        ({"held": 2}, "held"),
        ({"held": -1}, "held"),
        ({"tokens": -1}, "tokens"),
        ({"ready": float("nan")}, "seconds"),
        ({"ready": 1e9}, "seconds"),
        ({"request": "x" * (MAX_NAME + 1)}, "characters"),
        ({"replica": "x" * (MAX_NAME + 1)}, "characters"),
    ],
)
def test_figures_that_no_router_has_are_refused(fields: dict[str, Any], said: str) -> None:
    good = {"request": "1", "replica": "a", "tokens": 1, "ready": 0.0, "keys": bytes(16), "held": 0}
    check(Dispatched(**good))
    with pytest.raises(FeedError, match=said):
        check(Dispatched(**{**good, **fields}))


def test_another_version_is_refused_in_words() -> None:
    with pytest.raises(FeedError, match="version 99 of dispatches, this router reads"):
        check(Opening(version=99, router="r", instance=b""))


@given(
    st.lists(
        dispatches() | st.builds(Prefilled, request=NAMES) | st.builds(Ended, request=NAMES), max_size=20
    )
)
def test_a_stream_that_ends_leaves_nothing_behind(messages: list[Said]) -> None:
    replicas = {name: replica(name) for name in "ab"}
    known = Known("r", replicas, 3)
    for message in messages:
        known.hear(message, 5.0)
        assert len(known) <= 3
        assert all(item.elsewhere.prefills <= item.elsewhere.requests for item in replicas.values())
    known.forget()
    for item in replicas.values():
        assert figures(item) == (0, 0, 0)
        assert not len(item.pending)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["begin", "first", "end"])), max_size=40),
       st.integers(0, 40), KEYS)  # fmt: skip
def test_a_listener_that_joins_at_any_time_knows_what_runs(
    steps: list[tuple[int, str]], joins: int, keys: list[bytes]
) -> None:
    ours, theirs = replica("a"), replica("a")
    running = InFlightMap(100, 3600.0)
    running.watcher = publisher = Publisher("r", b"i", running)
    known, listeners = Known("r", {"a": theirs}, 100), []
    for number, (request, step) in enumerate(steps):
        if number == joins:
            listeners.append(publisher.listen(0.0))
        entry = running.get(str(request))
        if step == "begin":
            running.begin(InFlight(str(request), ours, keys, keys[1:], 100 + request, 2.0, 0.0))
        elif step == "first" and entry is not None:
            running.first_byte(entry, 1.0)
        elif step == "end":
            running.end(str(request))
    listeners = listeners or [publisher.listen(0.0)]
    for message in FrameDecoder[Said](Said).feed(bytes(listeners[0].frames)):
        known.hear(message, 0.0)
    assert figures(theirs) == (ours.outstanding_tokens, ours.outstanding_prefills, ours.outstanding_requests)


async def test_a_reader_that_is_too_slow_is_cut_off() -> None:
    listener = Listener(b"opening")
    assert await listener.take(60) == b"opening"
    listener.put(bytes(BUFFER_BYTES))
    listener.put(b"x")
    assert listener.cut_off
    assert await listener.take(60) == b""


def test_of_names_that_stand_for_too_many_only_so_many_are_followed() -> None:
    urls = [f"http://192.0.2.{number}:1" for number in range(MAX_NEIGHBOURS + 5)]
    stop, start = changes(["http://198.51.100.1:1", urls[3]], urls)
    assert stop == ["http://198.51.100.1:1"]
    assert len(start) == MAX_NEIGHBOURS - 1
    assert urls[3] not in start


def test_addresses_are_urls() -> None:
    with pytest.raises(ConfigError, match=r"neighbours\.urls"):
        validate(RouterSettings, {"replicas": [{"url": "http://e"}], "neighbours": {"urls": ["e:1"]}})


async def decided(running: Any, number: int = 0) -> Decision:
    body = json.dumps({"model": "m", "prompt": [number, *TOKENS]}).encode()
    decision = await running.mind.decide(body, COMPLETIONS)
    assert isinstance(decision, Decision)
    return decision


def listed(engines: list[FakeEngine]) -> list[dict[str, str]]:
    return [{"name": f"r{number}", "url": engine.url} for number, engine in enumerate(engines)]


async def test_two_routers_know_each_others_requests(router, until) -> None:
    """Both follow a list that names themselves too."""
    ports = free_ports(2)
    urls = [f"http://localhost:{port}" for port in ports]
    async with FakeEngine() as one, FakeEngine() as two:
        first, second = [
            await router(replicas=listed([one, two]), neighbours={"port": port, "urls": urls})
            for port in ports
        ]
        for number in range(4):
            mine = await decided(first, number)
            there = second.mind.replicas[mine.replica]
            await until(lambda there=there: there.elsewhere.requests == 1)
            assert there.elsewhere.tokens == mine.prompt_tokens
            assert len(there.pending) == 4
            await first.mind.report(mine.id, Report("first_byte"))
            await until(lambda there=there: there.elsewhere.prefills == 0)
            follower = await decided(second, number)
            assert (follower.replica, follower.predicted_tokens) == (mine.replica, 4 * 256)
            await second.mind.report(follower.id, Report("ended"))
            await first.mind.report(mine.id, Report("ended"))
            await until(lambda there=there: figures(there) == (0, 0, 0))
        assert first.mind.unheard() == second.mind.unheard() == 0


async def test_what_a_neighbour_sent_is_not_sent_there_again(router, until) -> None:
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with FakeEngine() as one, FakeEngine() as two:
        first, second = [
            await router(
                replicas=listed([one, two]), neighbours={"port": port, "urls": urls}, policy="least-load"
            )
            for port in ports
        ]
        for _ in range(6):  # by chance alone it would be one of 64
            mine = await decided(first)
            await until(lambda mine=mine: second.mind.replicas[mine.replica].elsewhere.requests == 1)
            other = await decided(second)
            assert other.replica != mine.replica
            await second.mind.report(other.id, Report("cancelled"))
            await first.mind.report(mine.id, Report("cancelled"))
            await until(lambda mine=mine: second.mind.replicas[mine.replica].elsewhere.requests == 0)
            await until(lambda other=other: first.mind.replicas[other.replica].elsewhere.requests == 0)


async def test_a_router_with_several_addresses_counts_once(router, until, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    agent = {"token_file": str(tmp_path / "token")}
    own, other = free_ports(2)
    urls = [f"http://127.0.0.{number}:{other}" for number in (1, 2, 3)]
    async with FakeEngine() as engine:
        first = await router(replicas=listed([engine]), agent=agent, neighbours={"port": own, "urls": urls})
        second = await router(
            replicas=listed([engine]), agent=agent, neighbours={"host": "0.0.0.0", "port": other}
        )
        mine = await decided(second)
        there = first.mind.replicas[mine.replica]
        await until(lambda: there.elsewhere.requests > 0)
        await until(lambda: first.mind.unheard() == 0)
        assert there.elsewhere.requests == 1


async def test_a_neighbour_with_another_token_is_unheard(router, until, http, tmp_path: Path) -> None:
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(name)
    async with FakeEngine() as engine:
        first, second = [
            await router(
                replicas=listed([engine]), agent={"token_file": str(tmp_path / name)},
                neighbours={"port": port, "urls": urls},
            )
            for port, name in zip(ports, ("right", "wrong"), strict=True)
        ]  # fmt: skip
        await until(lambda: first.mind.unheard() == second.mind.unheard() == 1)
        problem = "status 401: is agent.token_file the same as there?"
        told = {"url": urls[1], "router": "", "heard": False, "problem": problem}
        page = first.admin_url + names.PATH_REPLICAS
        await polled(http, page, lambda page: json.loads(page)["neighbours"] == [told])
        (tmp_path / "wrong").write_text("right")
        await until(lambda: first.mind.unheard() == second.mind.unheard() == 0)


async def test_without_the_token_nothing_is_told(router, http, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    token = tmp_path / "token"
    token.write_text("secret")
    async with FakeEngine() as engine:
        await router(
            replicas=listed([engine]), agent={"token_file": str(token)}, neighbours={"port": port, "urls": []}
        )
        url = f"http://127.0.0.1:{port}{names.PATH_DISPATCHES}"
        for header in ({}, {"Authorization": "Bearer other"}):
            async with http.get(url, headers=header) as answer:
                assert answer.status == 401
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked = f"GET {names.PATH_DISPATCHES} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer "
        writer.write(asked.encode() + b"\xff\r\n\r\n")
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        async with http.get(url, headers={"Authorization": "Bearer secret"}) as answer:
            (opening,) = FrameDecoder[Said](Said).feed(await answer.content.readany())
            assert isinstance(opening, Opening)


async def test_a_port_for_all_without_a_token_is_refused(router) -> None:
    async with FakeEngine() as engine:
        with pytest.raises(ConfigError, match=r"neighbours\.host: 0\.0\.0\.0 .* give agent\.token_file"):
            await router(replicas=listed([engine]), neighbours={"host": "0.0.0.0", "port": 0})


@asynccontextmanager
async def process(engines: list[FakeEngine], own: int, urls: list[str]) -> AsyncIterator[tuple[str, str]]:
    """A router process that hears another one: its URL, and that of its admin port."""
    port, admin = free_ports(2)
    replicas = [flag for engine in engines for flag in ("--replica", engine.url)]
    flags = ["--port", str(port), "--admin-port", str(admin), "--policy", "least-load"]
    flags += ["--neighbours.port", str(own), "--neighbours.urls", json.dumps(urls)]
    command = [sys.executable, "-m", "kvist_router", *replicas, *flags]
    child = await asyncio.create_subprocess_exec(*command)
    try:
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}"
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def polled(http: aiohttp.ClientSession, url: str, true: Callable[[str], bool]) -> None:
    """Wait until a page is as wanted."""
    page: str | None = None
    try:
        async with asyncio.timeout(60):
            while page is None or not true(page):
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(url) as answer:
                        page = await answer.text()
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"{url} stays: {page}")


def running(page: str, of: str = "elsewhere") -> int:
    return sum(item[of]["requests"] for item in json.loads(page)["replicas"])


async def test_two_router_processes_spread_what_both_get(http) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    told = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in told]
    async with FakeEngine() as one, FakeEngine() as two, AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(process([one, two], port, urls)) for port in told]
        (first, _), (second, page) = routers
        for url, admin in routers:
            await polled(http, url + "/readyz", lambda page: '"ready"' in page)
            await polled(http, admin + "/metrics", lambda page: 'neighbours{state="heard"} 1.0' in page)
        for engine in (one, two):
            engine.rest.clear()
        for count in range(1, 7):  # by chance alone it would be one of 64
            mine = await http.post(first + "/v1/chat/completions", json=chat)
            await polled(http, page + names.PATH_REPLICAS, lambda page: running(page) == 1)
            other = await http.post(second + "/v1/chat/completions", json=chat)
            assert mine.status == other.status == 200
            assert len(one.received) == len(two.received) == count
            mine.close()
            other.close()
            for _, admin in routers:
                await polled(http, admin + names.PATH_REPLICAS,
                             lambda page: not running(page) and not running(page, "outstanding"))  # fmt: skip
