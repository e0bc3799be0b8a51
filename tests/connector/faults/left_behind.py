"""What an agent leaves when it has ended or was killed, as its successor finds it."""

import time

from kvist_connector.agent.arena_file import ArenaFile
from kvist_connector.agent.catalog import Catalog
from kvist_connector.agent.journal import Journal
from kvist_connector.agent.memory import MemoryTier
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.fake_engine import content


def whole(arena):
    """What the agent leaves: its books agree, and every byte in its arena is right."""
    size = arena.stat().st_size
    file, catalog = ArenaFile.reserve(arena, size), Catalog("lru", [])
    memory = MemoryTier(file, Journal(arena), catalog, time.monotonic)
    assert memory.resume(2**52, ()) == len(catalog)
    memory.check_integrity()
    for key in catalog.keys(Tier.MEMORY):
        for rank, view in enumerate(memory.views(catalog.resident(key).ref)):
            assert bytes(view) == content(key, rank, len(view)), "wrong bytes"
    memory.close()
    file.give_up()
