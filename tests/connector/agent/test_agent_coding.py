"""Compression and encryption as settings of an agent: what its tiers hold, and what they refuse to serve."""

import base64
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from kvist_connector.agent.busy import Busy
from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.deletion_log import DeletionLog
from kvist_connector.agent.own import OwnTier
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.agent.shared import SharedTier
from kvist_connector.agent.stores import open_stores
from kvist_connector.errors import ConfigError
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.chunk_store import key
from kvist_connector.testing.patience import SECONDS, patient
from kvist_connector.tiers.header import unpack_header

FINGERPRINT = b"f" * 32
BODY = b"".join(bytes([number * 37 % 256, 60]) for number in range(4096))


@pytest.fixture
def agent(tmp_path):
    """Tiers of an agent with these settings, over the same folder and bucket each time."""

    @asynccontextmanager
    async def begin(keys="", compression="none", encryption=None):
        encryption = encryption or {}
        if keys:
            (tmp_path / "keys").write_text(keys)
            encryption = {"keys_file": tmp_path / "keys"}
        settings = AgentSettings(
            **patient(
                {
                    "replica": "r0",
                    "socket": tmp_path / "s",
                    "arena": tmp_path / "a",
                    "disk": {"path": tmp_path / "disk", "size": 1 << 20, "compression": compression},
                    "object_store": {"url": (tmp_path / "bucket").as_uri(), "compression": compression},
                    "encryption": encryption,
                }
            )
        )
        with ThreadPoolExecutor(2) as threads:
            stores = await open_stores(settings, threads, lambda tier: lambda *figures: None)
            catalog, busy, clock = Catalog("lru", list(stores)), Busy(), time.monotonic
            log = DeletionLog(settings.arena)
            lower = {
                Tier.DISK: OwnTier(Tier.DISK, stores[Tier.DISK], 1 << 20, catalog, busy, clock, log),
                Tier.OBJECT: SharedTier(
                    Tier.OBJECT, stores[Tier.OBJECT], catalog, busy, clock, lambda: len(BODY), SECONDS
                ),
            }
            for tier in lower.values():
                tier.serve(FINGERPRINT)
                await tier.scan()
            try:
                yield lower
            finally:
                for tier in lower.values():
                    await tier.close()

    return begin


def line(name, number):
    return f"{name} {base64.b64encode(bytes([number]) * 32).decode()}\n"


async def store(lower):
    for tier in lower.values():
        assert (await tier.store(Chunk(key(1), bytes(16), 0, len(BODY)), [memoryview(BODY)])).there


async def fetch(tier):
    buffer = bytearray(len(BODY))
    header = await tier.fetch(key(1), [memoryview(buffer)])
    return bytes(buffer) if header is not None else None


def files(tmp_path):
    return [path for name in ("disk", "bucket") for path in (tmp_path / name).glob("*/*") if path.is_file()]


@pytest.mark.parametrize("keys", ["", line("one", 1)])
async def test_every_tier_holds_less_and_gives_back_all(agent, tmp_path, keys):
    async with agent(keys, "zstd") as lower:
        await store(lower)
    stored = files(tmp_path)
    assert len(stored) == 2
    assert all(path.stat().st_size < 4096 + 0.8 * len(BODY) for path in stored)
    async with agent(keys) as lower:  # whatever is configured now
        assert await lower[Tier.OBJECT].find([key(1), key(2)], bytes(16), 0) == 1
        assert [await fetch(tier) for tier in lower.values()] == [BODY, BODY]


async def test_the_second_key_of_the_file_still_reads(agent):
    async with agent(line("old", 1)) as lower:
        await store(lower)
    async with agent(line("new", 2) + line("old", 1)) as lower:
        assert [await fetch(tier) for tier in lower.values()] == [BODY, BODY]


def key_ids(tmp_path):
    return [unpack_header(path.read_bytes()).key_id for path in files(tmp_path)]


async def test_keys_rotate_while_the_agent_runs(agent, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys"
    async with agent(line("old", 1)) as lower:
        await store(lower)
        file.write_text(line("new", 2) + line("old", 1))
        assert [await fetch(tier) for tier in lower.values()] == [BODY, BODY]
        assert (await lower[Tier.DISK].store(Chunk(key(2), key(1), 1, len(BODY)), [memoryview(BODY)])).there
        assert sorted(key_ids(tmp_path)) == ["new", "old", "old"]
        assert "encrypted by key 'new'; keys that decrypt: new, old" in caplog.text
        file.write_text(line("new", 2))
        assert await fetch(lower[Tier.OBJECT]) is None
        assert lower[Tier.OBJECT].counts["locked"] == 1


@pytest.mark.parametrize(
    "text", [None, "", "one c2hvcnQ=", "\udcff"], ids=["gone", "empty", "short", "binary"]
)
async def test_a_key_file_that_is_broken_later_leaves_the_keys_in_force(agent, tmp_path, caplog, text):
    async with agent(line("one", 1)) as lower:
        if text is None:
            (tmp_path / "keys").unlink()
        else:
            (tmp_path / "keys").write_bytes(text.encode(errors="surrogateescape"))
        await store(lower)
        assert [await fetch(tier) for tier in lower.values()] == [BODY, BODY]
    assert key_ids(tmp_path) == ["one", "one"]
    assert caplog.text.count("what was read before stays in force") == 1
    assert "c2hvcnQ" not in caplog.text


@pytest.mark.parametrize("keys", ["", line("other", 2), line("one", 2)], ids=["no", "another", "wrong"])
async def test_without_the_key_a_chunk_is_a_miss_that_is_counted_and_said_once(agent, tmp_path, caplog, keys):
    caplog.set_level(logging.WARNING)
    async with agent(line("one", 1)) as lower:
        await store(lower)
    async with agent(keys) as lower:
        assert [await fetch(tier) for tier in lower.values()] == [None, None]
        assert await fetch(lower[Tier.OBJECT]) is None
        assert lower[Tier.DISK].counts["locked"] == 1
        assert lower[Tier.OBJECT].counts["locked"] == 2
        said = [record.message for record in caplog.records if "locked" in record.message]
        assert len(said) == 2
        assert all("key" in message for message in said)
        await lower[Tier.DISK].settled()
    # What only this agent could read makes room; others may have the key of a shared one.
    assert [path.relative_to(tmp_path).parts[0] for path in files(tmp_path)] == ["bucket"]
    async with agent(line("one", 1)) as lower:
        assert await fetch(lower[Tier.OBJECT]) == BODY


async def test_a_wrong_key_file_stops_the_start_and_leaves_the_folder_free(agent, tmp_path):
    with pytest.raises(ConfigError, match=r"encryption\.keys_file"):
        async with agent("one c2hvcnQ="):
            pass
    with pytest.raises(ConfigError, match=r"encryption\.keys_file: .* cannot be read"):
        async with agent(encryption={"keys_file": tmp_path / "nothing"}):
            pass
    async with agent(line("one", 1)) as lower:
        await store(lower)
