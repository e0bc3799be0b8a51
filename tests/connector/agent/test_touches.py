"""Uses of chunks enter the eviction order later than the lookups that made them, but before it matters."""

import asyncio

import pytest

from kvist_connector.agent.catalog import Catalog
from kvist_connector.agent.touches import MOST_WAITING, Touches
from kvist_connector.protocol.engine import SlotRef
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.chunk_store import key


@pytest.fixture
def catalog():
    """With three chunks in memory, the oldest first."""
    found = Catalog("lru")
    for number in range(3):
        found.enter_memory(key(number), bytes(16), 0, 100, SlotRef(number, 1), float(number))
    return found


@pytest.fixture
def touches(catalog):
    made = Touches(catalog.touch)
    catalog.settle = made.settle
    return made


def use(catalog, touches, number, now):
    touches.add([catalog.get(key(number))], now)


async def test_the_order_has_every_use_until_now(catalog, touches):
    use(catalog, touches, 0, 10.0)
    assert catalog.next_victim(Tier.MEMORY).key == key(1)
    use(catalog, touches, 1, 11.0)
    assert catalog.victim(Tier.MEMORY).key == key(2)
    use(catalog, touches, 0, 12.0)
    assert catalog.order(Tier.MEMORY).get(key(0)).used == 12.0


async def test_what_comes_in_comes_after_uses_that_wait(catalog, touches):
    use(catalog, touches, 0, 10.0)
    catalog.enter_memory(key(3), key(0), 1, 100, SlotRef(3, 1), 11.0)
    used, new = (catalog.index(Tier.MEMORY).get(key(number)) for number in (0, 3))
    assert used.used == 10.0
    assert used.tick < new.tick


async def test_they_are_entered_when_nobody_asks(catalog):
    entered = asyncio.get_running_loop().create_future()
    touches = Touches(lambda chunk, now: entered.set_result((chunk.key, now)))
    use(catalog, touches, 0, 10.0)
    assert not entered.done()
    assert await asyncio.wait_for(entered, 60) == (key(0), 10.0)


async def test_those_that_wait_are_bounded(catalog, touches):
    chunk = catalog.get(key(0))
    touches.add([chunk] * (MOST_WAITING + 100), 10.0)
    assert chunk.hits >= 100
