"""The contract of a store that can only be read, over real sockets, and peers that lie, hang or leave."""

import asyncio
import socket
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from kvist_connector import names
from kvist_connector.agent.access import Access
from kvist_connector.agent.peer_api import PeerApi
from kvist_connector.agent.shelf import Opened
from kvist_connector.errors import TierError
from kvist_connector.protocol.peer import MAX_NAME_BYTES, MAX_NAMES, Question, Sizes, name_of
from kvist_connector.testing.chunk_store import ChunkStoreSuite, key, read_all
from kvist_connector.testing.chunk_store_machine import ChunkStoreMachine
from kvist_connector.tiers.anyone import AnyoneStore
from kvist_connector.tiers.base import Capabilities, Capacity, ChunkStore, Item, Read
from kvist_connector.tiers.deadline import DeadlineStore
from kvist_connector.tiers.faulty import FaultyStore
from kvist_connector.tiers.peer import PeerStore
from kvist_connector.tiers.peer_http import HttpTransfer
from kvist_connector.tiers.wrapper import WrapperStore

pytestmark = pytest.mark.timeout(60)
DEADLINE = 20.0
NAME = key(1)


class FileShelf:
    """Objects in one file, each in two spans, as those of two ranks are."""

    def __init__(self, file):
        self.file = file
        self.objects: dict[bytes, Opened] = {}
        self.open_now = 0
        self.gate = asyncio.Event()
        self.gate.set()

    def put(self, name: bytes, data: bytes) -> bool:
        if name in self.objects:
            return False
        start, half = self.file.seek(0, 2), len(data) // 2
        self.file.write(data[1:])
        spans = ((start, half), (start + half, len(data) - 1 - half)) if half else ((start, len(data) - 1),)
        self.objects[name] = Opened(data[:1], self.file, spans, self._closed)
        return True

    def sizes(self, asked):
        return [self.objects[name].size if name in self.objects else None for name in asked]

    async def open(self, name):
        await self.gate.wait()
        found = self.objects.get(name)
        self.open_now += found is not None
        return found

    def _closed(self):
        self.open_now -= 1


@asynccontextmanager
async def listening(application):
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def reading(url, token=None, connections=5):
    store = PeerStore(HttpTransfer(url, token, connections, DEADLINE))
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def shelf(tmp_path):
    with (tmp_path / "objects").open("w+b", buffering=0) as file:
        yield FileShelf(file)


@pytest.fixture
async def served(shelf):
    """The API over the shelf, and its address."""
    api = PeerApi(shelf, Access(lambda: "cluster"), reads=4, deadline=DEADLINE, linger=1000.0)
    async with listening(api.application()) as url:
        yield api, url
    assert shelf.open_now == 0


@pytest.fixture
async def peer(served):
    async with reading(served[1], lambda: "cluster") as store:
        yield store


class Stocked(WrapperStore):
    """Reads go to the peer; what a read-only store cannot do is done where the peer has its objects."""

    def __init__(self, inner: ChunkStore, shelf: FileShelf) -> None:
        super().__init__(inner)
        self._shelf = shelf
        self._turn = asyncio.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(persistent=False, shared=True, listable=True)

    async def put_if_absent(self, name, parts):
        return self._shelf.put(name, b"".join(parts))

    async def replace(self, name, seen, parts):
        async with self._turn:
            return await ChunkStore.replace(self, name, seen, parts)

    async def delete(self, name):
        return self._shelf.objects.pop(name, None) is not None

    async def items(self, prefix=b""):
        for name, found in self._shelf.objects.items():
            if name.startswith(prefix):
                yield Item(name, found.size)

    async def capacity(self):
        return Capacity(sum(found.size for found in self._shelf.objects.values()), None)


class TestPeer(ChunkStoreSuite):
    @pytest.fixture
    def store(self, peer, shelf):
        return Stocked(peer, shelf)


class TestSeveral(ChunkStoreSuite):
    """Two peers behind breakers; one never has anything."""

    @pytest.fixture
    async def store(self, served, shelf, tmp_path):
        def connect(url):
            inner = PeerStore(HttpTransfer(url, lambda: "cluster", 5, DEADLINE))
            return DeadlineStore(inner, limit=DEADLINE, most=4)

        with (tmp_path / "nothing").open("w+b", buffering=0) as file:
            api = PeerApi(FileShelf(file), Access(None), reads=1, deadline=DEADLINE)
            async with listening(api.application()) as empty:
                peers = AnyoneStore(connect, pause=5.0)
                peers.become([empty, served[1]])
                yield Stocked(peers, shelf)
                await peers.close()


async def test_any_order_of_changes_and_restarts_is_read_as_it_is(tmp_path):
    class Peers(ChunkStoreMachine):
        """Two peers, behind a store that is opened anew at each restart."""

        def __init__(self):
            super().__init__()
            self.file = (tmp_path / "objects").open("w+b", buffering=0)
            self.shelf = FileShelf(self.file)
            self.runners = []

        async def open(self):
            while len(self.runners) < 2:
                shelf = FileShelf(self.file) if self.runners else self.shelf
                api = PeerApi(shelf, Access(None), reads=2, deadline=DEADLINE)
                self.runners.append(web.AppRunner(api.application(), access_log=None, shutdown_timeout=0))
                await self.runners[-1].setup()
                await web.TCPSite(self.runners[-1], "127.0.0.1", 0).start()
            peers = AnyoneStore(lambda url: PeerStore(HttpTransfer(url, None, 2, DEADLINE)), pause=5.0)
            peers.become(f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in self.runners)
            return Stocked(peers, self.shelf)

        def teardown(self):
            for runner in self.runners:
                self._run(runner.cleanup())
            super().teardown()
            self.file.close()
            assert self.shelf.open_now == 0

    plan = settings(
        max_examples=8, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    # In a thread: the machine has a loop of its own.
    await asyncio.to_thread(run_state_machine_as_test, Peers, settings=plan)


@given(st.lists(st.binary(min_size=1, max_size=MAX_NAME_BYTES), max_size=MAX_NAMES))
def test_questions_and_sizes_come_back_as_they_were(asked):
    question = Question(names=tuple(asked))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(question), type=Question) == question
    assert [name_of(name.hex()) for name in asked] == asked
    sizes = Sizes(sizes=tuple(len(name) if name[0] % 2 else None for name in asked))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sizes), type=Sizes) == sizes


@given(st.text(max_size=80) | st.binary(max_size=40).map(bytes.hex))
def test_a_name_has_one_spelling(text):
    name = name_of(text)
    assert name is None or (name.hex() == text and 0 < len(name) <= MAX_NAME_BYTES)


async def test_a_store_that_can_only_be_read_says_so(peer):
    assert not peer.capabilities.writable
    with pytest.raises(TierError, match="only be read"):
        await peer.put_if_absent(NAME, [b"x"])
    assert not await peer.delete(NAME)


async def test_more_names_than_one_question_takes_are_asked_in_several(peer, shelf):
    shelf.put(key(2000), b"abc")
    found = await peer.sizes([key(number) for number in range(2001)])
    assert found == [None] * 2000 + [3]


async def test_a_wrong_or_missing_token_is_refused_in_words(served, shelf):
    api, url = served
    shelf.put(NAME, b"abc")
    for token in (lambda: "other", None):
        async with reading(url, token) as store:
            with pytest.raises(TierError, match=r"refuses the token.*http\.token_file"):
                await read_all(store, NAME, 3)
            (answer,) = await store.sizes([NAME])
            assert isinstance(answer, TierError)
    assert api.counts["peer_refused"] == 4
    assert not api.counts["peer_sent"]


async def test_an_object_stays_open_until_its_reader_asks_for_something_else(peer, shelf, served):
    shelf.put(NAME, b"x" * 1000)
    assert (await read_all(peer, NAME, 1000))[0] == 1000
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while not served[0].counts["peer_sent"]:  # the last byte comes before the server's own books
        await asyncio.sleep(0)
        assert loop.time() - begun < DEADLINE
    assert shelf.open_now == 1
    await peer.sizes([NAME])
    assert shelf.open_now == 0
    await served[0].settled()


async def test_and_not_for_ever(shelf):
    api = PeerApi(shelf, Access(None), reads=1, deadline=DEADLINE, linger=0.0)
    shelf.put(NAME, b"x" * 1000)
    closed = asyncio.Event()
    shelf.objects[NAME] = Opened(b"x", shelf.file, ((0, 999),), closed.set)
    async with listening(api.application()) as url, reading(url) as store:
        await read_all(store, NAME, 1000)
        async with asyncio.timeout(DEADLINE):
            await closed.wait()


async def test_reads_beyond_the_bound_wait_and_beyond_that_are_refused(shelf):
    api = PeerApi(shelf, Access(None), reads=1, deadline=DEADLINE)
    shelf.put(NAME, b"abc")
    shelf.gate.clear()
    async with listening(api.application()) as url, reading(url, connections=8) as store:
        reads = [asyncio.create_task(read_all(store, NAME, 3)) for _ in range(6)]
        async with asyncio.timeout(DEADLINE):
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        # One runs, four wait.
        with pytest.raises(TierError, match="too many reads"):
            await done.pop()
        shelf.gate.set()
        results = await asyncio.gather(*reads, return_exceptions=True)
    assert results.count((3, b"abc")) == 5
    assert api.counts["peer_busy"] == 1
    assert shelf.open_now == 0


async def test_a_reader_that_leaves_closes_the_object(peer, shelf, served):
    shelf.put(NAME, bytes(64 << 20))
    loop, url = asyncio.get_running_loop(), served[1]
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    request = f"GET {names.PATH_PEER_CHUNKS}/{NAME.hex()} HTTP/1.1\r\nHost: x\r\n"
    writer.write(f"{request}Authorization: Bearer cluster\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    assert shelf.open_now == 1
    writer.transport.abort()
    begun = loop.time()
    while shelf.open_now:  # the server learns of it by its next write
        await asyncio.sleep(0)
        assert loop.time() - begun < DEADLINE
    assert served[0].counts["peer_left"] == 1


async def test_a_reader_that_hangs_is_cut_off_at_the_deadline(shelf):
    api = PeerApi(shelf, Access(None), reads=1, deadline=0.05)
    shelf.put(NAME, bytes(64 << 20))
    async with listening(api.application()) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"), limit=1024)
        writer.write(f"GET {names.PATH_PEER_CHUNKS}/{NAME.hex()} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        begun = asyncio.get_running_loop().time()
        while not api.counts["peer_late"]:  # nobody reads meanwhile: a quick machine would have sent it all
            await asyncio.sleep(0)
            assert asyncio.get_running_loop().time() - begun < DEADLINE
        async with asyncio.timeout(DEADLINE):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(64 << 20)
        writer.transport.abort()
    assert (api.counts["peer_late"], shelf.open_now) == (1, 0)


async def test_a_read_that_is_given_up_leaves_the_buffer_alone(peer, shelf):
    shelf.put(NAME, b"x" * (4 << 20))
    for turns in range(0, 60, 3):
        into = bytearray(4 << 20)
        read = asyncio.create_task(peer.get(Read(NAME, [memoryview(into)])))
        for _ in range(turns):
            await asyncio.sleep(0)
        read.cancel()
        await asyncio.gather(read, return_exceptions=True)
        left = bytes(into)
        assert await read_all(peer, NAME, 3) == (4 << 20, b"xxx")
        assert bytes(into) == left


def answering(body=b"", status=200, chunked=False, **headers):
    """A peer that answers everything like that."""

    async def handle(request):
        response = web.StreamResponse(status=status, headers=headers)
        if "Content-Length" not in headers and not chunked:
            response.content_length = len(body)
        await response.prepare(request)
        await response.write(body)
        if "Content-Length" in headers:
            request.transport.close()
        return response

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    return application


@pytest.mark.parametrize(
    ("peer_says", "words"),
    [
        (answering(b"<html>"), "something else than sizes"),
        (answering(msgspec.msgpack.encode(Sizes(sizes=(1, 2)))), "2 sizes for 1 names"),
        (answering(msgspec.msgpack.encode(["Sizes", [-1]])), "something else than sizes"),
        (answering(b"\0" * 100_000), "at most 65536 are right"),
        (answering(status=302, Location="http://127.0.0.1:1/"), "answers with 302"),
        (answering(status=500), "answers with 500"),
    ],
)
async def test_an_answer_that_is_none_is_a_failure(peer_says, words):
    async with listening(peer_says) as url, reading(url) as store:
        (answer,) = await store.sizes([NAME])
        assert isinstance(answer, TierError)
        assert words in str(answer)


@pytest.mark.parametrize(
    ("peer_says", "words"),
    [
        (answering(b"abc", **{"Content-Length": "9"}), "closed 6 bytes before the end"),
        (answering(b"abc", chunked=True), "does not say how long"),
        (answering(status=302, Location="http://127.0.0.1:1/"), "answers with 302"),
    ],
)
async def test_an_object_that_is_none_is_a_failure(peer_says, words):
    async with listening(peer_says) as url, reading(url) as store:
        with pytest.raises(TierError, match=words):
            await read_all(store, NAME, 9)


async def raw(answer):
    """A server that sends these bytes to whoever says something, and its address."""

    async def greet(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "the connection was closed"),
        (b"+PONG\r\n\r\n", "is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n", "is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd", "is not HTTP"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "status 100"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 20_000, "longer than 16384"),
    ],
)
async def test_what_does_not_speak_http_is_a_failure(answer, words):
    server, url = await raw(answer)
    async with server, reading(url) as store:
        with pytest.raises(TierError, match=words):
            await read_all(store, NAME, 4)


async def test_a_connection_that_was_closed_while_idle_is_replaced(shelf, peer, served):
    shelf.put(NAME, b"abc")
    assert await read_all(peer, NAME, 3) == (3, b"abc")
    (connection,) = peer._transfer._idle
    connection._socket.shutdown(socket.SHUT_RDWR)
    assert await read_all(peer, NAME, 3) == (3, b"abc")
    await peer.sizes([NAME])  # answered after what was sent before it on this connection
    assert served[0].counts["peer_sent"] == 2


async def test_what_is_longer_than_wanted_is_not_read():
    size = 1 << 40
    async with (
        listening(answering(b"x" * 4096, **{"Content-Length": str(size)})) as url,
        reading(url) as store,
    ):
        assert await read_all(store, NAME, 4) == (size, b"xxxx")


async def test_a_peer_that_is_gone_is_a_failure_with_its_address():
    async with listening(web.Application()) as url:
        pass
    async with reading(url) as store:
        with pytest.raises(TierError, match=url):
            await read_all(store, NAME, 1)


class Memory(ChunkStore):
    """A peer without sockets."""

    def __init__(self, **objects: bytes) -> None:
        self.objects = {key(int(name[1:])): data for name, data in objects.items()}

    @property
    def capabilities(self):
        return Capabilities(persistent=False, shared=True, listable=False, writable=False)

    async def get(self, read):
        data = self.objects.get(read.key)
        if data is not None and read.into:
            read.into[0][: len(data)] = data
        return None if data is None else len(data)

    async def put_if_absent(self, name, parts):
        raise AssertionError

    async def delete(self, name):
        raise AssertionError

    async def items(self, prefix=b""):
        return
        yield

    async def capacity(self):
        return Capacity(0, None)

    async def close(self):
        pass


class Several:
    """Peers a and b; b also has what a has."""

    def __init__(self):
        self.now = 0.0
        self.a, self.b = FaultyStore(Memory(k1=b"one")), FaultyStore(Memory(k1=b"one", k2=b"two"))
        self.guest = FaultyStore(Memory(k3=b"three"))
        self.failures: list[str] = []
        stores = {"a": self.a, "b": self.b}
        self.store = AnyoneStore(lambda url: stores.get(url, self.guest), 5.0, lambda: self.now)
        self.store.become(["a", "b"])
        self.store.on_failure = lambda peer, error: self.failures.append(peer)


async def test_any_peer_will_do_and_one_that_fails_is_not_missed():
    peers = Several()
    assert await peers.store.sizes([key(1), key(2), key(9)]) == [3, 3, None]
    peers.a.plan = lambda operation, name: TierError("down")
    assert await peers.store.sizes([key(1), key(2)]) == [3, 3]
    assert await read_all(peers.store, key(1), 3) == (3, b"one")
    assert await read_all(peers.store, key(9), 3) == (None, bytes(3))
    assert peers.failures == ["a", "a"]
    await peers.store.probe()


async def test_only_when_none_can_be_asked_is_it_a_failure():
    peers = Several()
    for peer in (peers.a, peers.b):
        peer.plan = lambda operation, name: TierError("down")
    assert [str(answer) for answer in await peers.store.sizes([key(1), key(2)])] == ["down", "down"]
    with pytest.raises(TierError, match="down"):
        await peers.store.probe()
    assert await peers.store.get(Read(key(1), ())) is None


async def test_a_read_goes_to_whoever_said_it_has_it():
    peers = Several()
    await peers.store.sizes([key(2)])
    assert await read_all(peers.store, key(2), 3) == (3, b"two")
    assert not [call for call in peers.a.calls if call[0] == "get"]


async def test_a_peer_whose_bytes_were_wrong_is_left_alone_for_a_while():
    peers = Several()
    await peers.store.sizes([key(2)])
    await read_all(peers.store, key(2), 3)
    assert peers.store.distrust(key(2)) == "b"
    assert await peers.store.sizes([key(2)]) == [None]
    assert await peers.store.get(Read(key(2), ())) is None
    peers.now = 5.0
    assert await peers.store.sizes([key(2)]) == [3]


async def test_a_guest_is_read_from_and_never_asked():
    peers = Several()
    await peers.store.visit("http://guest:1", [key(3)])
    assert await read_all(peers.store, key(3), 5) == (5, b"three")
    assert await peers.store.sizes([key(3)]) == [None]
    assert not [call for call in peers.guest.calls if call[0] == "ask"]


async def test_peers_come_and_go():
    peers = Several()
    assert peers.store.become(["b", "http://new:1"]) == [peers.a]
    assert await peers.store.sizes([key(1), key(3)]) == [3, 5]
    assert not peers.a.calls
    assert peers.store.become(["b", "http://new:1"]) == []
    await peers.store.change([])
    assert await peers.store.sizes([key(1)]) == [None]
    await peers.store.probe()
