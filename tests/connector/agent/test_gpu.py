"""GPU residency from KV events: right keys, and honest about what was missed."""

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.agent.gpu_events import GpuEvents
from kvist_connector.agent.gpu_index import AllBlocksCleared, BlockRemoved, BlockStored, GpuIndex
from kvist_connector.keys import root_key, tail_keys
from kvist_connector.testing.fake_engine import layout, prompt_keys

DEADLINE = 20.0
FINGERPRINT = b"f" * 32


def stored(tokens, first=1, parent=None, **changes):
    """Blocks of 4 tokens with hashes first, first + 1, ..."""
    hashes = list(range(first, first + len(tokens) // 4))
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=list(tokens),
        block_size=4,
        medium="GPU",
        **changes,
    )


@pytest.fixture
def index():
    found = GpuIndex(lambda key, added: None, lambda known: None)
    found.serve(layout())
    found.restart()
    return found


def prefixes(tokens, root=None):
    """All keys at block ends, chunk by chunk."""
    root = root or root_key(FINGERPRINT)
    keys = []
    for start in range(0, len(tokens), 8):
        chunk = tail_keys(root, tokens[start : start + 8], 4, 8)
        keys += chunk
        root = chunk[-1] if chunk else root
    return keys


def test_blocks_become_prefix_keys(index):
    index.apply([stored(range(20))])
    assert index.keys() == prefixes(list(range(20)))
    assert set(prompt_keys(range(20))) <= set(index.keys())


@given(cuts=st.lists(st.integers(1, 4), max_size=8))
def test_how_events_are_cut_does_not_matter(cuts):
    index = GpuIndex(lambda key, added: None, lambda known: None)
    index.serve(layout())
    tokens, position = list(range(48)), 0
    for blocks in cuts:
        part = tokens[position * 4 : (position + blocks) * 4]
        if part:
            index.apply([stored(part, first=position + 1, parent=position or None)])
        position += blocks
    assert index.keys() == prefixes(tokens[: position * 4])


def test_removed_blocks_leave_and_copies_count(index):
    index.apply([stored(range(8)), stored(range(8))])
    index.apply([BlockRemoved(block_hashes=[2], medium="GPU")])
    assert len(index) == 2
    index.apply([BlockRemoved(block_hashes=[2], medium="GPU")])
    assert index.keys() == prefixes(list(range(4)))
    index.apply([BlockRemoved(block_hashes=[77], medium="GPU")])
    index.apply([AllBlocksCleared()])
    assert len(index) == 0


def test_salt_and_adapter_have_chains_of_their_own(index):
    index.apply([stored(range(8), extra_keys=[["tenant"], None])])
    assert index.keys() == prefixes(list(range(8)), root_key(FINGERPRINT, salt="tenant"))
    index.apply([AllBlocksCleared()])
    index.apply([stored(range(8), lora_name="a", extra_keys=[["a", "tenant"], ["a"]])])
    assert index.keys() == prefixes(list(range(8)), root_key(FINGERPRINT, lora="a", salt="tenant"))


@pytest.mark.parametrize(
    "event",
    [
        stored(range(8), extra_keys=[[["image", 0]], None]),
        stored(range(8), parent=99),
        stored(range(8), group_idx=1),
        BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=[1, 2], block_size=2, medium="GPU"),
        BlockStored(
            block_hashes=[1], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=4, medium="CPU"
        ),
    ],
)
def test_what_has_no_exact_key_is_left_out(index, event):
    index.apply([event])
    assert len(index) == 0


def test_another_fingerprint_starts_over(index):
    index.apply([stored(range(8))])
    index.serve(layout(b"g" * 32))
    assert len(index) == 0


class Publisher:
    """vLLM's publisher with its replay socket, as VLLM-NOTES tells it."""

    def __init__(self):
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.buffer = []
        self.sequence = 0
        self.task = asyncio.create_task(self.serve())

    async def publish(self, *events, lose=False):
        payload = msgspec.msgpack.encode([0.0, events, 0])
        number, self.sequence = self.sequence, self.sequence + 1
        self.buffer.append((number, payload))
        if not lose:
            await self.pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def serve(self):
        while True:
            client, _, start = await self.router.recv_multipart()
            for number, payload in self.buffer:
                if number >= int.from_bytes(start, "big"):
                    await self.router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self):
        self.task.cancel()
        self.context.destroy(linger=0)


class Followed:
    """An index whose changes can be awaited."""

    def __init__(self):
        self.news = asyncio.Event()
        self.known = []
        self.index = GpuIndex(lambda key, added: self.news.set(), self._known)
        self.index.serve(layout())

    def _known(self, known):
        self.known.append(known)
        self.news.set()

    async def until(self, wanted):
        async with asyncio.timeout(DEADLINE):
            while not wanted():
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def publisher():
    found = Publisher()
    yield found
    found.close()


@pytest.fixture
async def follow(publisher):
    running = []

    async def begin(replay=True):
        followed = Followed()
        events = GpuEvents(publisher.endpoint, publisher.replay_endpoint if replay else None, followed.index)
        running.append((events, asyncio.create_task(events.run())))
        return followed, events

    yield begin
    for events, task in running:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        events.close()


async def subscribed(publisher, followed):
    """ZMQ drops what is published before the subscription arrived: publish until something comes."""
    async with asyncio.timeout(DEADLINE):
        while not followed.index.known:
            followed.news.clear()
            await publisher.publish(AllBlocksCleared())
            try:
                async with asyncio.timeout(0.05):
                    await followed.news.wait()
            except TimeoutError:
                continue


async def test_a_new_engine_is_empty_and_then_followed(publisher, follow):
    followed, events = await follow()
    events.engine_arrived("e1")
    await followed.until(lambda: followed.known == [True])
    await subscribed(publisher, followed)
    await publisher.publish(stored(range(8)))
    await publisher.publish(stored(range(8, 16), first=3, parent=2))
    await followed.until(lambda: len(followed.index) == 4)
    assert followed.index.keys() == prefixes(list(range(16)))


async def test_an_agent_that_starts_late_replays(publisher, follow):
    await publisher.publish(stored(range(8)))
    followed, events = await follow()
    events.engine_arrived("e1")
    await followed.until(lambda: len(followed.index) == 2)
    assert followed.known == [True]


async def test_a_gap_is_replayed(publisher, follow):
    followed, events = await follow()
    events.engine_arrived("e1")
    await followed.until(lambda: followed.index.known)
    await subscribed(publisher, followed)
    await publisher.publish(stored(range(8)), lose=True)
    await publisher.publish(stored(range(8, 16), first=3, parent=2))
    while len(followed.index) < 4:
        followed.news.clear()
        await publisher.publish()
        await followed.until(lambda: len(followed.index) == 4)
    assert followed.index.known


async def test_a_gap_without_replay_is_unknown_until_cleared(publisher, follow):
    followed, _ = await follow(replay=False)
    await subscribed(publisher, followed)
    await publisher.publish(stored(range(8)))
    await followed.until(lambda: len(followed.index) == 2)
    await publisher.publish(stored(range(8, 16), first=3, parent=2), lose=True)
    await publisher.publish(stored(range(16, 24), first=5, parent=4))
    await followed.until(lambda: not followed.index.known)
    assert len(followed.index) == 0
    await publisher.publish(AllBlocksCleared())
    await followed.until(lambda: followed.index.known)
    await publisher.publish(stored(range(8)))
    await followed.until(lambda: len(followed.index) == 2)
