"""Agents that read each other's arenas over real sockets: exact, leased, bounded, and never in the way."""

import asyncio
import logging
import os

import aiohttp
import pytest
from aiohttp import web

from kvist_connector.agent.peer_settings import PeerSettings
from kvist_connector.agent.selection import RequestError
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_parts import answer, ask
from kvist_connector.testing.agent_parts import keys_of as keys
from kvist_connector.testing.fake_engine import layout, prompt_keys
from kvist_connector.testing.peer_agents import PeerAgent
from kvist_connector.tiers.header import checksum, unpack_header

pytestmark = pytest.mark.timeout(120)
PEER = [Tier.PEER]


@pytest.fixture
async def start(tmp_path):
    """Starts agents that are gone at the end of the test."""
    running = []

    async def begin(*peers, **settings):
        urls = [peer if isinstance(peer, str) else peer.url for peer in peers]
        peer = {"urls": urls} | settings.pop("peer", {})
        running.append(await PeerAgent.start(tmp_path / f"agent{len(running)}", peer=peer, **settings))
        return running[-1]

    yield begin
    for agent in running:
        await agent.unserve()
    for agent in running:
        await agent.stop()


@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_one_agent_has_in_memory_the_other_loads_bit_equal(start, ranks):
    first = await start()
    writer = await first.engine(layout(ranks=ranks))
    await first.computed(keys(12), root=b"r" * 16)
    second = await start(first)
    reader = await second.engine(layout(ranks=ranks))
    found = await reader.lookup(keys(14))
    assert found.tiers == bytes(PEER * 12)
    assert reader.holds(keys(12), found)
    chunk = second.parts.catalog.get(keys(1)[0])
    assert (chunk.parent, chunk.index) == (b"r" * 16, 0)
    assert (await reader.lookup(keys(12))).tiers == bytes([Tier.MEMORY] * 12)
    assert writer.holds(keys(12), await writer.lookup(keys(12)))
    await first.unserve()
    await first.check()
    await second.check()


async def test_tags_and_the_epoch_of_retirement_travel_with_a_chunk(start):
    first, tags = await start(), ("doc", "mail")
    await first.computed(keys(2), tags=tags, epoch=7)
    second = await start(first)
    reader = await second.engine()
    assert len((await reader.lookup(keys(2))).refs) == 2
    chunk = second.parts.catalog.get(keys(2)[1])
    assert (chunk.tags, chunk.epoch) == (tags, 7)


async def test_what_is_retired_here_is_not_taken_from_a_peer_that_does_not_know(start):
    first = await start()
    await first.computed(keys(4), tags=("doc",), epoch=1)
    second = await start(first)
    reader = await second.engine()
    await second.parts.controls.retire.retire({"tag": "doc"})
    assert not (await reader.lookup(keys(4))).refs
    assert second.counts["retired"] >= 1
    # It is no lie of the peer's: what it has besides is taken.
    await first.computed(keys(4, first=500))
    assert (await reader.lookup(keys(4, first=500))).tiers == bytes(PEER * 4)
    await second.check()


async def test_models_do_not_see_each_other(start):
    first = await start()
    await first.computed(keys(4))
    second = await start(first)
    other = await second.engine(layout(b"g" * 32))
    assert not (await other.lookup(keys(4))).refs
    assert not (await other.lookup(prompt_keys(range(32), b"g" * 32))).refs
    assert "foreign" not in second.counts


async def test_nothing_is_written_to_or_deleted_at_a_peer(start):
    first = await start()
    second = await start(first)
    await second.computed(keys(4))
    assert second.parts.writebehind.pending_chunks == 0
    assert not first.parts.catalog.keys(Tier.MEMORY)
    engine = await first.computed(keys(6, first=100))
    reader = await second.engine()
    await reader.lookup(keys(6, first=100))
    await second.check()
    did = await second.parts.controls.edits.clear({"tier": "all"})
    assert did["chunks"] == 10
    assert (await second.parts.controls.edits.clear({"tier": "peer"}))["chunks"] == 0
    assert len((await engine.lookup(keys(6, first=100))).refs) == 6
    with pytest.raises(RequestError, match="router"):
        await second.parts.controls.edits.move({"all": True, "to": "peer"})


async def test_a_chunk_on_the_peers_disk_only_is_not_found_by_a_lookup(start, tmp_path):
    first = await start(disk={"path": tmp_path / "disk"})
    await first.computed(keys(3))
    assert await first.parts.writebehind.flush(20)
    second = await start(first)
    reader = await second.engine()
    await first.parts.controls.edits.clear({"tier": "memory"})
    assert not (await reader.lookup(keys(3))).refs


async def test_who_only_serves_lets_no_lookup_wait(start):
    alone = await start()
    engine = await alone.computed(keys(2))
    ask(engine, keys(4))
    answers = await engine.scheduler.expect(wire.Answer)
    assert (answers.pending, len(answers.refs)) == (False, 2)


async def test_the_nearest_of_several_tiers_is_read(start, tmp_path):
    first = await start()
    await first.computed(keys(3))
    second = await start(first, object_store={"url": f"file://{tmp_path}/objects"})
    reader = await second.engine()
    await reader.store(keys(3))
    await reader.lookup(keys(3))
    assert await second.parts.writebehind.flush(20)
    await second.parts.controls.edits.clear({"tier": "memory"})
    assert (await reader.lookup(keys(3))).tiers == bytes(PEER * 3)


@pytest.fixture
async def lying(start):
    """A peer with six chunks, and an address where its objects are changed on the way."""
    first = await start()
    await first.computed(keys(6))
    spoils, held = [lambda head, body: (head, body)], asyncio.Event()
    held.set()

    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def handle(request):
            await held.wait()
            async with session.request(
                request.method, first.url + request.path, data=await request.read()
            ) as reply:
                body = await reply.read()
                if request.method == "GET" and reply.status == 200:
                    body = b"".join(spoils[-1](body[:4096], body[4096:]))
                return web.Response(status=reply.status, body=body)

        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield first, f"http://127.0.0.1:{runner.addresses[0][1]}", spoils, held
        held.set()
        await runner.cleanup()


def flipped(head, body):
    return head, body[:-1] + bytes([body[-1] ^ 1])


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (flipped, "corrupt"),
        (lambda head, body: (head, body[:-4]), "corrupt"),
        (lambda head, body: (head, body + b"more"), "corrupt"),
        (lambda head, body: (bytes(4096), body), "corrupt"),
        (lambda head, body: (b"", b""), "corrupt"),
        (lambda head, body: (b"", b"x"), "corrupt"),
    ],
    ids=["flipped", "short", "long", "no header", "empty", "tiny"],
)
async def test_a_peer_that_lies_is_a_miss_counted_logged_once_and_left_alone(
    start, lying, caplog, spoil, cause
):
    _, url, spoils, _ = lying
    spoils.append(spoil)
    second = await start(url, peer={"pause": 1000.0, "concurrency": 1})
    reader = await second.engine()
    with caplog.at_level(logging.WARNING):
        assert not (await reader.lookup(keys(6))).refs
        asked = second.counts["asked"]
        assert not (await reader.lookup(keys(5))).refs
    assert second.counts[cause] >= 1
    assert second.counts["peer_failed"] >= 1
    assert second.counts["asked"] == asked + 1  # the tier was asked, and nobody else was
    assert len([record for record in caplog.records if record.getMessage().startswith(f"peer {url}")]) == 1
    # The engine goes on with what it computes itself.
    await reader.store(keys(6))
    assert reader.holds(keys(6), await reader.lookup(keys(6)))
    await second.check()


async def test_a_peer_that_gives_another_chunk_is_not_believed(start, lying):
    _, url, spoils, _ = lying
    seen = []

    def swapped(head, body):
        seen.append((head, body))
        return seen[0]

    spoils.append(swapped)
    second = await start(url, peer={"pause": 1000.0})
    reader = await second.engine()
    found = await reader.lookup(keys(6))
    assert len(found.refs) <= 1
    assert reader.holds(keys(6), found)
    await second.check()


async def test_a_peer_that_hangs_is_a_miss_at_the_deadline(start, lying):
    _, url, _, held = lying
    held.clear()
    second = await start(url, peer={"lookup_deadline": 0.1})
    reader = await second.engine()
    for count in range(6, 0, -1):
        assert not (await reader.lookup(keys(count))).refs
    assert second.counts["peer_failed"] >= 1
    await reader.store(keys(6))
    assert len((await reader.lookup(keys(6))).refs) == 6
    await second.check()


async def test_a_peer_that_hangs_in_the_middle_is_what_was_read_so_far(start, lying):
    _, url, spoils, held = lying
    second = await start(url, peer={"deadline": 0.2, "concurrency": 1})
    reader = await second.engine()

    def hang(head, body):
        held.clear()
        return head, body

    spoils.append(hang)
    ask(reader, keys(6))
    found = await answer(reader)
    assert len(found.refs) <= 1
    assert reader.holds(keys(6), found)
    assert second.counts["peer_failed"] >= 1


async def test_a_peer_that_is_gone_is_a_miss_and_its_return_is_noticed(start, caplog):
    first = await start()
    await first.computed(keys(4))
    second = await start(first, peer={"pause": 0.001})
    reader = await second.engine()
    port = int(first.url.rpartition(":")[2])
    await first.unserve()
    for _ in range(4):
        assert not (await reader.lookup(keys(4))).refs
    assert second.counts["peer_failed"] >= 3
    assert second.parts.controls.stats()["tiers"]["peer"]["problem"]
    await first.serve(port)
    async with asyncio.timeout(60):
        while not (await reader.lookup(keys(4))).refs:
            pass  # each lookup waits for its answer
    assert reader.holds(keys(4), await reader.lookup(keys(4)))
    told = [record.getMessage().partition(": ")[0] for record in caplog.records]
    assert told.count(f"peer {first.url}") == 1
    await second.check()


async def test_one_of_two_peers_that_is_gone_is_not_missed(start):
    first, gone = await start(), await start()
    await first.computed(keys(4))
    second = await start(gone, first)
    await gone.unserve()
    reader = await second.engine()
    for _ in range(4):
        found = await reader.lookup(keys(4))
        assert reader.holds(keys(4), found)
        assert len(found.refs) == 4
        await second.parts.controls.edits.clear({"tier": "memory"})
    assert second.parts.controls.stats()["tiers"]["peer"]["problem"] == ""


async def test_another_token_is_refused_and_told(start, caplog):
    first = await start(token="right")
    await first.computed(keys(4))
    second = await start(first, token="wrong")
    reader = await second.engine()
    with caplog.at_level(logging.WARNING):
        assert not (await reader.lookup(keys(4))).refs
        assert not (await reader.lookup(keys(3))).refs
    told = [record for record in caplog.records if "refuses the token" in record.getMessage()]
    assert len([record for record in told if record.getMessage().startswith("peer http")]) == 1
    third = await start(first, token="right")
    other = await third.engine()
    assert (await other.lookup(keys(4))).tiers == bytes(PEER * 4)


async def test_a_chunk_that_is_being_sent_is_neither_evicted_nor_cleared(start):
    first = await start(peer={"reads": 1})
    await first.computed(keys(2))
    shelf = first.agent.shelf
    opened = await shelf.open(b"f" * 16 + keys(2)[1])
    did = await first.parts.controls.edits.clear({"tier": "memory"})
    assert (did["chunks"], did["leased"]) == (1, 1)
    opened.close()
    assert (await first.parts.controls.edits.clear({"tier": "memory"}))["chunks"] == 1
    await first.check()


async def test_a_checksum_is_of_what_lies_in_the_slot_now(start):
    """It is taken once for each generation of a slot."""
    first = await start(memory=1 << 17)  # a few slots
    slots = []
    for number in (0, 500, 0, 500, 0, 500):
        await first.computed(keys(2, first=number))
        for _ in range(2):
            opened = await first.agent.shelf.open(b"f" * 16 + keys(2, first=number)[1])
            body = [os.pread(opened.file.fileno(), length, offset) for offset, length in opened.spans]
            assert unpack_header(opened.head).checksum == checksum(body)
            opened.close()
        slots.append(opened.spans)
        await first.parts.controls.edits.clear({"tier": "memory"})
    assert len({tuple(spans) for spans in slots}) < len(slots), "no slot was used twice"
    await first.check()


async def test_the_arena_is_not_laid_out_anew_under_a_read(start):
    first = await start()
    engine = await first.computed(keys(2))
    opened = await first.agent.shelf.open(b"f" * 16 + keys(2)[1])
    await engine.stop()
    other = asyncio.create_task(first.engine(layout(b"g" * 32)))
    for _ in range(100):
        await asyncio.sleep(0)
    assert first.parts.memory.layout.fingerprint == b"f" * 32
    opened.close()
    await other
    assert first.parts.memory.layout.fingerprint == b"g" * 32


async def test_a_copy_at_a_peer_is_no_reason_to_let_the_own_one_go(start):
    first = await start()
    await first.computed(keys(2))
    second = await start(first)
    reader = await second.engine()
    # Computing is slow here: where a copy counts, one that can be loaded again is worth less.
    reader.scheduler.send(wire.Step(load=wire.EngineLoad(prefill_seconds_per_token=1.0)))
    assert len((await reader.lookup(keys(2))).refs) == 2
    await second.computed(keys(2, first=500))
    memory = second.parts.catalog.index(Tier.MEMORY)
    assert Tier.PEER in second.parts.catalog.get(keys(2)[1]).below
    for read, computed in zip(keys(2), keys(2, first=500), strict=True):
        assert memory.get(read).weight == memory.get(computed).weight > 1.0


async def test_peers_need_a_token_beyond_loopback_and_memory(tmp_path):
    common = {"replica": "r", "socket": tmp_path / "s", "arena": tmp_path / "a"}
    with pytest.raises(ValueError, match=r"peer\.host: without http\.token_file"):
        AgentSettings(**common, peer={"host": "0.0.0.0"})
    with pytest.raises(ValueError, match=r"peer\.host: with memory 0"):
        AgentSettings(**common, memory=0, peer={"host": "127.0.0.1"})
    assert not AgentSettings(**common).peer.used


@pytest.mark.parametrize(
    "url", ["https://a:1", "http://a:1/path", "a:1", "http://", "http://u:p@a:1", "file:///x", "http://a:1?q"]
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError):
        PeerSettings(urls=[url])


def test_addresses_have_one_form():
    assert PeerSettings(urls="http://a, http://[::1]:9/").urls == ("http://a:8300", "http://[::1]:9")
    for given, url in (
        ("10.0.0.1", "http://10.0.0.1:8300"),
        ("fd00::1", "http://[fd00::1]:8300"),
        ("http://a", "http://a:8300"),
    ):
        assert PeerSettings(address=given).address == url


async def test_a_peers_memory_is_no_reason_for_the_router_to_count_it_here(start):
    first = await start()
    await first.computed(keys(2))
    second = await start(first)
    await second.engine()
    feed = second.parts.feed.open("reader")
    found = await second.parts.controls.lookup({"keys": [key.hex() for key in keys(2)]})
    assert [chunk["tiers"] for chunk in found["chunks"]] == [["peer"]] * 2
    await asyncio.sleep(0)  # changes are told at the end of a turn
    frames = await feed.take()
    assert not any(key in frames for key in keys(2))
    second.parts.feed.leave("reader", feed)
