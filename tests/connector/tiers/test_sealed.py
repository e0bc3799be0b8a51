"""Parts whose first is made from the others: whoever writes them, and however, stores the same bytes."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.errors import IntegrityError, StorageFull
from kvist_connector.testing.chunk_store import key, read_all
from kvist_connector.tiers.base import Sealed, total_bytes
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.envelope import EnvelopeStore

LIMIT = 1 << 26
FINGERPRINT = b"f" * 32


def sealed(body):
    digest = xxhash.xxh3_64()
    return Sealed(8, body, digest.update, digest.digest)


def expected(body):
    return xxhash.xxh3_64_digest(b"".join(body)) + b"".join(body)


@given(
    body=st.lists(st.binary(max_size=60), max_size=5),
    told=st.lists(st.integers(1, 40), max_size=12),
)
def test_whatever_was_seen_before_the_head_is_asked_for(body, told):
    parts = sealed(body)
    pieces = iter(told)
    for view in parts.body:
        start = 0
        while start < view.nbytes and (size := next(pieces, 0)):
            parts.see(view[start : start + size])
            start += size
        if start < view.nbytes:
            break
    assert total_bytes(parts) == 8 + total_bytes(body)
    assert b"".join(parts) == expected(body), "the head is of something else than the body"
    assert parts[0] == parts.head == expected(body)[:8]


@pytest.fixture
async def disk(tmp_path):
    with ThreadPoolExecutor(2) as threads:
        store = await DiskStore.open(tmp_path, LIMIT, "none", threads)
        yield store
        await store.close()


@pytest.mark.parametrize("sizes", [(), (1,), (5000, 0, 70), (3 * 1024 * 1024 + 5, 100)])
async def test_a_disk_stores_what_others_would(disk, sizes):
    body = [bytes([number]) * size for number, size in enumerate(sizes, 1)]
    parts = sealed(body)
    assert await disk.put_if_absent(key(1), parts)
    whole = expected(body)
    assert await read_all(disk, key(1), len(whole)) == (len(whole), whole)
    assert (await disk.capacity()).used == len(whole)


async def test_short_writes_are_continued(disk, monkeypatch):
    import os

    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, views: real(fd, [views[0][:7]]))
    body = [b"abcdefghij", b"klmnopqrstuvw"]
    assert await disk.put_if_absent(key(1), sealed(body))
    assert await read_all(disk, key(1), 31) == (31, expected(body))


async def test_a_head_that_cannot_be_made_leaves_nothing(disk, tmp_path):
    def refuse():
        raise ValueError("tags")

    with pytest.raises(ValueError, match="tags"):
        await disk.put_if_absent(key(1), Sealed(8, [b"body"], lambda piece: None, refuse))
    assert not list(tmp_path.glob("??/*"))
    assert (await disk.capacity()).used == 0


async def test_the_limit_counts_the_head(disk):
    with pytest.raises(StorageFull):
        await disk.put_if_absent(key(1), sealed([bytes(LIMIT)]))


async def test_a_chunk_is_hashed_where_it_is_written_and_verified(disk, tmp_path):
    """The loop's thread only hands it over; a flipped bit is found."""
    with ThreadPoolExecutor(2) as threads:
        store = EnvelopeStore(disk, threads)
        chunk = [memoryview(bytearray(b"x" * 700_000)), memoryview(bytearray(b"y" * 900_000))]
        assert await store.put_if_absent(
            chunk, fingerprint=FINGERPRINT, key=key(1), parent=key(0), index=1, tags=("t",)
        )
        into = [memoryview(bytearray(700_000)), memoryview(bytearray(900_000))]
        header = await store.get(FINGERPRINT, key(1), into)
        assert header is not None
        assert (header.tags, into) == (("t",), chunk)
        path = next(tmp_path.glob("??/*.kvist"))
        data = bytearray(await asyncio.to_thread(path.read_bytes))
        data[-1] ^= 1
        await asyncio.to_thread(path.write_bytes, data)
        with pytest.raises(IntegrityError):
            await store.get(FINGERPRINT, key(1), into)
