"""A real agent process, driven through its socket and its HTTP API."""

import asyncio
import gzip
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from kvist_connector.arena.geometry import file_bytes, slots_that_fit
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.framing import encode
from kvist_connector.testing.agent_process import AgentProcess, launch
from kvist_connector.testing.fake_engine import Connection, FakeEngine, FakeWorker, layout, prompt_keys

DEADLINE = 20.0


@pytest.fixture
async def start(tmp_path):
    """Starts agents that are gone at the end of the test."""
    running = []

    async def begin(folder: Path = tmp_path, **settings):
        agent = await AgentProcess.start(folder, **settings)
        running.append(agent)
        return agent

    yield begin
    for agent in running:
        if agent._process.returncode is None:
            await agent.kill()


async def until(check):
    """Wait for a condition of the agent's stats, with a deadline."""
    async with asyncio.timeout(DEADLINE):
        while not await check():
            pass  # each check is a request that waits for its answer


async def slots(agent, **wanted):
    async def check():
        found = (await agent.stats())["slots"]
        return all(found[state] == count for state, count in wanted.items())

    await until(check)


def keys(chunks: int, first: int = 0) -> list[bytes]:
    return prompt_keys(range(first, first + 8 * chunks))


async def test_what_is_committed_is_found_and_reads_back(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(6))
    answer = await engine.lookup(keys(8))
    assert len(answer.refs) == 6
    assert answer.known == 6
    assert answer.tiers == bytes([1] * 6)
    assert engine.holds(keys(6), answer)
    await engine.stop()


async def test_ranks_have_bytes_of_their_own(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket, layout(ranks=2))
    await engine.store(keys(3))
    assert engine.holds(keys(3), await engine.lookup(keys(3)))
    await engine.stop()


async def test_lookup_stops_at_the_first_missing_chunk(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(6))
    engine.scheduler.send(wire.Step(bad_keys=keys(6)[2]))
    answer = await engine.lookup(keys(6))
    assert len(answer.refs) == 2
    assert answer.known == 2
    gone = await engine.scheduler.expect(wire.Evicted)
    assert gone.keys == keys(6)[2]
    await engine.stop()


async def test_a_second_commit_of_a_key_frees_its_slot(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(2))
    await engine.store(keys(2))
    await engine.lookup(keys(2))
    stats = await agent.stats()
    assert stats["slots"]["committed"] == 2
    assert stats["counters"]["commits_duplicate"] == 2
    assert stats["slots"]["reserved"] == stats["granted"]
    await engine.stop()


async def test_no_chunk_without_its_parent(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(3), start=2)
    assert (await engine.scheduler.expect(wire.Evicted)).keys == keys(3)[2]
    await engine.store(keys(1))
    (ref,) = await engine.grant()
    skipping = wire.Commit(ref=ref, key=keys(3)[2], parent=keys(1)[0], index=2)
    engine.scheduler.send(wire.Step(commits=(skipping,)))
    assert (await engine.scheduler.expect(wire.Evicted)).keys == keys(3)[2]
    stats = await agent.stats()
    assert stats["slots"]["committed"] == 1
    assert stats["counters"]["commits_orphaned"] == 2
    assert stats["slots"]["reserved"] == stats["granted"]
    await engine.stop()


async def test_a_slot_that_was_not_granted_cannot_be_committed(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    (ref,) = await engine.grant()
    forged = wire.SlotRef(ref.slot, ref.generation + 1)
    engine.scheduler.send(
        wire.Step(commits=(wire.Commit(ref=forged, key=keys(1)[0], parent=bytes(16), index=0),))
    )
    assert not (await engine.lookup(keys(1))).refs
    await engine.stop()


async def test_leased_chunks_outlive_pressure_and_others_make_room(start):
    agent = await start(memory=40 * 16384)
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(4))
    held = await engine.lookup(keys(4), release=False)
    for round_ in range(1, 12):
        await engine.store(keys(4, first=1000 * round_))
    assert engine.holds(keys(4), held)
    assert len((await engine.lookup(keys(4), "again")).refs) == 4
    evicted = engine.scheduler.received(wire.Evicted)
    assert evicted
    assert not any(key in message.keys for key in keys(4) for message in evicted)
    await engine.stop()


async def test_everything_leased_means_no_room_and_no_hang(start):
    agent = await start(memory=12 * 16384)
    engine = await FakeEngine.start(agent.socket)
    total = engine.workers[0].arena.geometry.slots
    held = []
    while (await agent.stats())["leases"] < total - 2:
        chain = keys(1, first=1000 * len(held))
        await engine.store(chain)
        held.append(f"r{len(held)}")
        await engine.lookup(chain, held[-1], release=False)
    for number in range(4):
        await engine.store(keys(1, first=50_000 + 1000 * number))
    assert (await agent.stats())["leases"] == total - 2
    for number, request in enumerate(held):
        chain = keys(1, first=1000 * number)
        assert engine.holds(chain, await engine.lookup(chain, request, release=False))
    engine.scheduler.send(wire.Step(releases=tuple(held)))
    await engine.store(keys(5, first=99))
    assert len((await engine.lookup(keys(5, first=99))).refs) == 5
    await engine.stop()


async def test_killed_and_restarted_agent_keeps_committed_chunks(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(5))
    await engine.lookup(keys(5))
    granted = (await agent.stats())["granted"]
    await agent.kill()
    again = await start()
    # The workers still live and have not come to rest: nothing they may write is given away.
    await slots(again, committed=5, quarantine=granted, reserved=0)
    worker = engine.workers[0]
    hello = wire.Hello(protocol=1, role="worker", engine="e", member=worker.member, rank=0, pid=os.getpid())
    connection = await Connection.open(again.socket, hello)
    ticket = (await connection.expect(wire.Quiesce)).ticket
    connection.send(wire.Quiesced(ticket=ticket))
    await slots(again, committed=5, quarantine=0)
    await connection.close()
    await engine.stop()
    second = await FakeEngine.start(again.socket)
    answer = await second.lookup(keys(5))
    assert len(answer.refs) == 5
    assert second.holds(keys(5), answer)
    await second.stop()


async def test_a_dead_worker_frees_what_was_quarantined_for_it(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    granted = await engine.grant(1)
    await engine.scheduler.close()
    await slots(agent, reserved=0)
    assert (await agent.stats())["slots"]["quarantine"] > 0
    assert not engine.workers[0].fill(granted[0], b"late" * 4096)
    await engine.workers[0].close()
    await slots(agent, quarantine=0)


async def test_disconnect_frees_leases(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(3))
    await engine.lookup(keys(3), release=False)
    assert (await agent.stats())["leases"] == 3
    await engine.stop()

    async def freed():
        stats = await agent.stats()
        return stats["leases"] == 0 and stats["connections"] == {"scheduler": 0, "worker": 0}

    await until(freed)


async def test_disk_is_written_behind_and_read_back_without_rewriting(start, tmp_path):
    agent = await start(disk__path=tmp_path / "disk", disk__size="10Mi")
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(6))
    await engine.lookup(keys(6))
    assert await agent.post("/v1/kvist/flush", {"deadline": 20}) == (
        200,
        {"pending_chunks": 0, "pending_bytes": 0},
    )
    status, removed = await agent.post("/v1/kvist/clear", {"tier": "memory"})
    assert (status, removed["chunks"], removed["leased"]) == (200, 6, 0)
    answer = await engine.lookup(keys(6))
    assert answer.tiers == bytes([2] * 6)
    assert engine.holds(keys(6), answer)
    await agent.post("/v1/kvist/flush", {"deadline": 20})
    stats = await agent.stats()
    assert stats["counters"]["written"] == 6
    assert stats["tiers"]["disk"]["stored_bytes"] == 6 * stats["chunk_bytes"]
    assert stats["tiers"]["disk"]["loaded_bytes"] == 6 * stats["chunk_bytes"]
    await engine.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_flushes_and_a_new_arena_is_filled_from_disk(start, tmp_path, number):
    agent = await start(disk__path=tmp_path / "disk", disk__size="10Mi")
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(20))
    await engine.lookup(keys(20))
    assert await agent.terminate(number) == 0
    assert agent.arena.exists()
    await engine.stop()
    agent.arena.unlink()
    again = await start(disk__path=tmp_path / "disk", disk__size="10Mi")
    second = await FakeEngine.start(again.socket)
    answer = await second.lookup(keys(20))
    assert answer.tiers == bytes([2] * 20)
    assert second.holds(keys(20), answer)
    await second.stop()


async def test_spoiled_chunk_files_are_counted_deleted_and_missed(start, tmp_path):
    agent = await start(disk__path=tmp_path / "disk", disk__size="10Mi")
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(4))
    await engine.lookup(keys(4))
    await agent.post("/v1/kvist/flush", {"deadline": 20})
    await agent.post("/v1/kvist/clear", {"tier": "memory"})
    path = next((tmp_path / "disk").glob(f"??/{keys(4)[2].hex()}.kvist"))
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    answer = await engine.lookup(keys(4))
    assert len(answer.refs) == 2
    assert engine.holds(keys(2), answer)
    stats = await agent.stats()
    assert stats["tier_counters"]["disk"]["corrupt"] == 1
    assert not path.exists()
    await engine.stop()


async def test_an_engine_of_another_fingerprint(start, tmp_path):
    agent = await start(disk__path=tmp_path / "disk", disk__size="10Mi")
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(3))
    await engine.lookup(keys(3))
    await agent.post("/v1/kvist/flush", {"deadline": 20})
    other = layout(b"g" * 32, model="other")
    with pytest.raises(PermissionError, match="another fingerprint"):
        await FakeWorker.connect(agent.socket, "x", 0, other)
    await engine.stop()
    second = await FakeEngine.start(agent.socket, other)
    assert not (await second.lookup(keys(3))).refs
    assert (await agent.stats())["tiers"]["disk"]["chunks"] == 0
    await second.stop()
    third = await FakeEngine.start(agent.socket)
    answer = await third.lookup(keys(3))
    assert answer.tiers == bytes([2] * 3)
    assert third.holds(keys(3), answer)
    await third.stop()


async def test_ranks_that_disagree_are_refused_in_words(start):
    agent = await start()
    first = await FakeWorker.connect(agent.socket, "e", 0, layout(ranks=2))
    with pytest.raises(PermissionError, match="layers 4 against 5"):
        await FakeWorker.connect(agent.socket, "e", 1, layout(ranks=2, layers=5))
    await first.close()


async def test_memory_below_one_chunk_is_refused_in_words(start):
    agent = await start(memory="16Ki")
    with pytest.raises(PermissionError, match="smaller than one chunk"):
        await FakeWorker.connect(agent.socket, "e", 0, layout())


async def test_index_only(start):
    agent = await start(memory=0)
    hello = wire.Hello(protocol=1, role="scheduler", engine="e", member="s", rank=0, pid=1)
    connection = await Connection.open(agent.socket, hello)
    assert "memory is 0" in (await connection.expect(wire.Welcome)).disabled
    worker = await FakeWorker.connect(agent.socket, "e", 0, layout())
    arena = await connection.expect(wire.Arena)
    assert (arena.geometry.slots, arena.path, arena.fingerprint) == (0, "", b"f" * 32)
    connection.send(wire.Lookup(request="r", keys=b"".join(keys(2)), tokens=16))
    answer = await connection.expect(wire.Answer)
    assert (answer.refs, answer.pending) == ((), False)
    assert not connection.received(wire.Grant)
    await connection.close()
    await worker.close()


async def test_reset_forgets_the_model(start, tmp_path):
    agent = await start(disk__path=tmp_path / "disk", disk__size="10Mi")
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(3))
    await engine.lookup(keys(3))
    await agent.post("/v1/kvist/flush", {"deadline": 20})
    engine.scheduler.send(wire.Reset())
    assert not (await engine.lookup(keys(3))).refs
    stats = await agent.stats()
    assert stats["tiers"]["memory"]["chunks"] == stats["tiers"]["disk"]["chunks"] == 0
    await engine.store(keys(3))
    assert engine.holds(keys(3), await engine.lookup(keys(3)))
    await engine.stop()


async def test_clear_leaves_leased_chunks(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(4))
    held = await engine.lookup(keys(2), release=False)
    _, removed = await agent.post("/v1/kvist/clear", {"tier": "all"})
    assert (removed["chunks"], removed["leased"]) == (2, 2)
    assert engine.holds(keys(2), held)
    await engine.stop()


async def test_a_peer_that_breaks_the_protocol_is_disconnected(start):
    agent = await start()
    for garbage in (b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", b"GET / HTTP/1.1\r\n\r\n"):
        reader, writer = await asyncio.open_unix_connection(str(agent.socket))
        writer.write(garbage)
        async with asyncio.timeout(DEADLINE):
            assert await reader.read() == b""
        writer.close()
    old = wire.Hello(protocol=99, role="scheduler", engine="e", member="s", rank=0, pid=1)
    connection = await Connection.open(agent.socket, old)
    assert "same version" in (await connection.expect(wire.Refused)).reason
    await connection.close()
    assert (await agent.get("/healthz"))[0] == 200


async def failure(folder, **settings):
    process = await launch(folder, **settings)
    async with asyncio.timeout(DEADLINE):
        _, errors = await process.communicate()
    assert process.returncode == 2
    return errors.decode()


async def test_a_second_agent_is_refused(start, tmp_path):
    await start()
    assert "served by another agent" in await failure(tmp_path)
    assert "used by another agent" in await failure(tmp_path, socket=tmp_path / "other.sock")


async def test_an_arena_that_does_not_fit_is_refused(tmp_path):
    text = await failure(tmp_path, memory="900T")
    assert "lower memory" in text
    assert "free" in text


async def test_wrong_settings_name_field_value_and_remedy(tmp_path):
    assert "memory: '1x' is not valid" in await failure(tmp_path, memory="1x")
    assert "loopback" in await failure(tmp_path, http__host="0.0.0.0")
    assert "socket" in await failure(tmp_path, socket="/tmp/" + "x" * 200)


async def test_the_port_that_is_taken_is_named(start, tmp_path):
    agent = await start()
    port = agent.url.rpartition(":")[2]
    other = {"socket": tmp_path / "b.sock", "arena": tmp_path / "b"}
    assert f"127.0.0.1:{port} cannot be used" in await failure(tmp_path, http__port=port, **other)


async def test_bearer_token(start, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    agent = await start(http__token_file=tmp_path / "token")
    assert (await agent.get("/healthz"))[0] == 200
    for path in ("/v1/kvist/stats", "/metrics", "/v1/kvist/feed?reader=a"):
        assert (await agent.get(path))[0] == 401
        assert (await agent.get(path, Authorization="Bearer wrong"))[0] == 401
    assert (await agent.get("/v1/kvist/stats", Authorization="Bearer secret"))[0] == 200


async def test_http_lookup_by_tokens_and_keys(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(3))
    await engine.lookup(keys(3))
    status, found = await agent.post("/v1/kvist/lookup", {"tokens": list(range(40))})
    assert status == 200
    assert (found["hit_chunks"], found["hit_tokens"]) == (3, 24)
    assert found["chunks"][0] == {"key": keys(1)[0].hex(), "tiers": ["memory"]}
    _, same = await agent.post("/v1/kvist/lookup", {"keys": [key.hex() for key in keys(5)]})
    assert same["hit_chunks"] == 3
    _, salted = await agent.post("/v1/kvist/lookup", {"tokens": list(range(40)), "salt": "tenant"})
    assert salted["hit_chunks"] == 0
    await engine.stop()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("lookup", {}, "tokens"),
        ("lookup", {"tokens": [-1] * 8}, "tokens"),
        ("lookup", {"keys": ["zz"]}, "keys"),
        ("lookup", {"keys": ["00"]}, "keys"),
        ("clear", {"tier": "tape"}, "tier"),
        ("flush", {"deadline": -1}, "deadline"),
        ("lookup", {"token": [1]}, None),
    ],
)
async def test_bad_bodies_are_refused_by_field(start, path, body, field):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    status, answer = await agent.post(f"/v1/kvist/{path}", body)
    assert status == 400
    assert answer["error"]["field"] == field
    await engine.stop()


async def test_idle_exit(start):
    agent = await start(idle_exit=0.3)
    assert await agent.wait() == 0


async def test_metrics_are_exposed(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(2))
    await engine.lookup(keys(2))
    status, text = await agent.get("/metrics")
    assert status == 200
    assert 'kvist_agent_tier_chunks{tier="memory"} 2.0' in text
    assert "kvist_agent_loop_stall_p99_seconds" in text
    await engine.stop()


async def test_the_arena_is_really_allocated(start):
    agent = await start(memory="2Mi")
    status = agent.arena.stat()
    assert status.st_blocks * 512 >= 2 * 1024 * 1024
    engine = await FakeEngine.start(agent.socket)
    geometry = engine.workers[0].arena.geometry
    assert geometry.slots == slots_that_fit(2 * 1024 * 1024, 1, 16384)
    assert file_bytes(geometry) <= status.st_size
    await engine.stop()


async def test_another_size_is_refused_while_workers_map_the_arena(start, tmp_path):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    await agent.kill()
    text = await failure(tmp_path, memory="2Mi")
    assert "still map" in text
    await engine.stop()
    again = await start(memory="2Mi")
    assert (await again.stats())["memory_bytes"] == 2 << 20


async def test_a_feed_reader_that_leaves_is_forgotten(start):
    agent = await start()
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"{agent.url}/v1/kvist/feed?reader=a") as response,
    ):
        await response.content.readany()
        assert await reader_count(agent, 1)
    await until(lambda: reader_count(agent, 0))
    assert (await agent.get("/v1/kvist/feed"))[0] == 400


async def reader_count(agent, count):
    return f"kvist_agent_feed_readers {count}.0" in (await agent.get("/metrics"))[1]


async def test_kill_9_at_any_moment_never_serves_wrong_bytes(start, tmp_path):
    """The agent dies at arbitrary points of a stream of commits, evictions, writes and reads."""
    settings = {"memory": 24 * 16384, "disk__path": tmp_path / "disk", "disk__size": 40 * 20480}
    found = 0
    for round_ in range(4):
        agent = await start(**settings)
        engine = await FakeEngine.start(agent.socket)
        for number in range(6):
            chain = keys(5, first=1000 * number)
            answer = await engine.lookup(chain)
            assert engine.holds(chain, answer)
            found += len(answer.refs)
        try:
            async with asyncio.timeout(DEADLINE):
                killer = asyncio.create_task(kill_after(agent, commits=7 + 5 * round_))
                for number in range(200):
                    chain = keys(5, first=1000 * (number % 6))
                    await engine.store(chain)
                    await engine.lookup(chain)
        except ConnectionError:
            pass
        await killer
        await engine.stop()
    assert found > 0


async def kill_after(agent, commits):
    async def enough():
        return (await agent.stats())["counters"].get("commits_accepted", 0) >= commits

    await until(enough)
    await agent.kill()


async def refusal(folder: Path, **settings) -> str:
    """What an agent says that does not start."""
    process = await launch(folder, **settings)
    async with asyncio.timeout(DEADLINE):
        _, errors = await process.communicate()
    assert process.returncode == 2
    text = errors.decode()
    assert text.startswith("kvist-agent: ")
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize("setting", ["socket", "arena"])
async def test_a_file_of_somebody_else_is_left_alone(tmp_path, setting):
    file = tmp_path / "letter.txt"
    file.write_text("dear reader")
    text = await refusal(tmp_path, **{setting: file})
    assert text.startswith(f"kvist-agent: {setting}: {file} exists and is no {setting}")
    assert file.read_text() == "dear reader"


@pytest.mark.parametrize("setting", ["socket", "arena", "http__token_file", "config"])
async def test_a_folder_in_place_of_a_file_is_named(tmp_path, setting):
    text = await refusal(tmp_path, **{setting: tmp_path})
    assert setting.replace("__", ".") in text
    assert str(tmp_path) in text


async def test_a_token_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "token"
    file.write_bytes(b"\xff\xfe")
    assert f"http.token_file: {file} is not text" in await refusal(tmp_path, http__token_file=file)


async def test_a_folder_in_place_of_the_journal_is_named(tmp_path):
    agent = await AgentProcess.start(tmp_path)
    engine = await FakeEngine.start(agent.socket)
    await engine.stop()
    await agent.kill()
    (tmp_path / "arena.journal").unlink()
    (tmp_path / "arena.journal").mkdir()
    assert f"arena: {tmp_path}/arena.journal cannot be read" in await refusal(tmp_path)


async def test_an_engine_hears_that_there_is_no_room_for_the_journal(start, tmp_path):
    agent = await start()
    # The partial file of a rewrite cannot be made: as on a file system without room.
    (tmp_path / "arena.journal.partial").symlink_to(tmp_path / "missing" / "file")
    reader, writer = await asyncio.open_unix_connection(str(agent.socket))
    hello = wire.Hello(
        protocol=wire.PROTOCOL_VERSION, role="worker", engine="e", member="m", rank=0, pid=os.getpid()
    )
    writer.write(encode(hello) + encode(wire.Register(layout=layout())))
    async with asyncio.timeout(DEADLINE):
        answer = await reader.read()
    assert b"arena.journal cannot be written" in answer
    assert (await agent.get("/healthz"))[0] == 200
    writer.close()


async def test_too_few_open_files_are_refused_in_words(tmp_path):
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32));"
        "from kvist_connector.agent.app import run; sys.exit(run(sys.argv[1:]))"
    )
    flags = ["--replica", "r", "--socket", tmp_path / "s", "--arena", tmp_path / "a", "--http.port", "0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *map(str, flags), stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode().startswith("kvist-agent: open files: a limit of 32 is too low")


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"a":' * 5000])
async def test_a_body_nested_without_end_is_refused(start, body):
    agent = await start()
    async with (
        aiohttp.ClientSession() as client,
        client.post(agent.url + "/v1/kvist/lookup", data=body) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "the body is nested too deeply"


async def raw(url: str, request: bytes) -> bytes:
    """What is answered to these bytes, until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(request)
    async with asyncio.timeout(DEADLINE):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def question(header: bytes, body: bytes) -> bytes:
    length = b"content-length: %d\r\nconnection: close\r\n" % len(body)
    return b"POST /v1/kvist/lookup HTTP/1.1\r\nhost: a\r\n" + header + length + b"\r\n" + body


async def test_headers_and_bodies_of_strangers_are_refused_without_a_trace(start, tmp_path):
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length")
    agent = await start(http__token_file=token)
    known = b"authorization: Bearer a-token-of-some-length\r\n"
    packed = b"content-encoding: gzip\r\n"
    bomb = gzip.compress(bytes(10_000_000))
    for header, body, status in (
        (b"authorization: Bearer \xff\r\n", b"{}", 401),
        (b"authorization: \xff\xfe\r\n", b"{}", 401),
        (packed, b"no gzip", 401),
        (packed, bomb, 401),
        (known + packed, b"no gzip", 400),
        (known + packed, gzip.compress(b"{}")[:-4], 400),
        (known + packed, bomb, 400),
        (known, b"\xff", 400),
        (known, b'{"all":"\xff"}', 400),
    ):
        answer = await raw(agent.url, question(header, body))
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    stderr = agent._process.stderr
    assert await agent.terminate() == 0
    assert b"Traceback" not in await stderr.read()
