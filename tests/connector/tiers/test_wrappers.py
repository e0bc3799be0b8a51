"""Wrappers around a store: deadline and breaker, metering."""

import asyncio
import itertools

import pytest

from kvist_connector.errors import StorageFull, TierError
from kvist_connector.testing.chunk_store import key
from kvist_connector.tiers.base import Capabilities, Capacity, ChunkStore, Read
from kvist_connector.tiers.deadline import DeadlineStore, LateAnswerError
from kvist_connector.tiers.faulty import FaultyStore
from kvist_connector.tiers.metered import MeteredStore


class Memory(ChunkStore):
    """The smallest store."""

    def __init__(self):
        self.objects = {}

    @property
    def capabilities(self):
        return Capabilities(persistent=False, shared=False, listable=False)

    async def get(self, read):
        data = self.objects.get(read.key)
        if data is not None:
            read.into[0][: len(data)] = data
        return None if data is None else len(data)

    async def put_if_absent(self, name, parts):
        if name in self.objects:
            return False
        self.objects[name] = b"".join(parts)
        return True

    async def delete(self, name):
        return self.objects.pop(name, None) is not None

    async def items(self, prefix=b""):
        return
        yield

    async def capacity(self):
        return Capacity(0, None)

    async def close(self):
        pass


def read() -> Read:
    return Read(key(1), [memoryview(bytearray(8))])


async def test_a_hung_store_is_a_tier_error():
    faulty = FaultyStore(Memory())
    faulty.gate.clear()
    with pytest.raises(TierError, match="no answer"):
        await DeadlineStore(faulty, limit=0.01).get(read())


async def test_the_breaker_opens_probes_and_closes():
    now = [0.0]
    errors = [TierError("down")]
    faulty = FaultyStore(Memory(), lambda operation, name: errors[0] if errors else None)
    store = DeadlineStore(faulty, limit=5, failures=3, pause=10, clock=lambda: now[0])
    for _ in range(3):
        with pytest.raises(TierError, match="down"):
            await store.get(read())
    with pytest.raises(TierError, match="paused"):
        await store.get(read())
    assert len(faulty.calls) == 3
    now[0] = 11.0
    faulty.gate.clear()
    probe = asyncio.create_task(store.get(read()))
    await asyncio.sleep(0)
    with pytest.raises(TierError, match="paused"):
        await store.get(read())
    errors.clear()
    faulty.gate.set()
    assert await probe is None
    assert await store.put_if_absent(key(1), [b"x"])


async def test_operations_wait_for_their_turn_and_questions_do_not():
    faulty = FaultyStore(Memory())
    faulty.gate.clear()
    store = DeadlineStore(faulty, limit=1000, most=2)
    async with asyncio.TaskGroup() as group:
        gets = [group.create_task(store.get(read())) for _ in range(6)]
        question = group.create_task(store.sizes([key(1)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [operation for operation, _ in faulty.calls] == ["get", "get", "ask"]
        faulty.gate.set()
    assert [get.result() for get in gets] == [None] * 6
    assert question.result() == [None]


async def test_late_answers_stop_questions_only_until_an_answer_in_time():
    faulty = FaultyStore(Memory())
    faulty.gate.clear()
    store = DeadlineStore(faulty, limit=1000, failures=2, pause=1000, ask=0.01, clock=lambda: 0.0)
    for wanted in ("no answer within 0.01 s", "no answer within 0.01 s", "paused"):
        (answer,) = await store.sizes([key(1)])
        assert isinstance(answer, LateAnswerError)
        assert wanted in str(answer)
    assert (store.open, store.problem) == (False, "")
    faulty.gate.set()
    assert await store.get(read()) is None
    assert isinstance((await store.sizes([key(1)]))[0], LateAnswerError)
    await store.probe()
    assert await store.sizes([key(1)]) == [None]


async def test_a_probe_that_was_slow_itself_allows_no_questions():
    now = itertools.count()
    faulty = FaultyStore(Memory())
    faulty.gate.clear()
    store = DeadlineStore(
        faulty, limit=1000, failures=1, pause=1000, ask=0.01, clock=lambda: float(next(now))
    )
    await store.sizes([key(1)])
    faulty.gate.set()
    await store.probe()
    assert isinstance((await store.sizes([key(1)]))[0], LateAnswerError)


async def test_no_room_is_no_failure_of_the_store():
    faulty = FaultyStore(Memory(), lambda operation, name: StorageFull("full"))
    store = DeadlineStore(faulty, limit=5, failures=1)
    for _ in range(3):
        with pytest.raises(StorageFull):
            await store.put_if_absent(key(1), [b"x"])
    assert not store.open


async def test_the_meter_tells_hits_misses_and_errors_apart():
    seen = []
    now = iter(range(100))
    faulty = FaultyStore(Memory())
    store = MeteredStore(faulty, lambda *figures: seen.append(figures), clock=lambda: float(next(now)))
    await store.get(read())
    await store.put_if_absent(key(1), [b"abc"])
    await store.put_if_absent(key(1), [b"abc"])
    await store.get(read())
    faulty.plan = lambda operation, name: TierError("down")
    with pytest.raises(TierError):
        await store.delete(key(1))
    assert seen == [
        ("get", "miss", 0, 1.0),
        ("put", "ok", 3, 1.0),
        ("put", "present", 0, 1.0),
        ("get", "ok", 3, 1.0),
        ("delete", "TierError", 0, 1.0),
    ]
