"""The envelope: nothing but the chunk that was asked for comes out, whatever happened to the file."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvist_connector.errors import IntegrityError, TierError
from kvist_connector.testing.chunk_store import key
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.envelope import HEADER_BYTES, EnvelopeStore, Header
from kvist_connector.tiers.faulty import FaultyStore
from kvist_connector.tiers.header import pack_header, unpack_header

FINGERPRINT = b"f" * 32
BODY = bytes(range(256)) * 16


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[EnvelopeStore]:
    with ThreadPoolExecutor(2) as threads:
        disk = await DiskStore.open(tmp_path, 1 << 24, "none", threads)
        yield EnvelopeStore(disk, threads)
        await disk.close()


async def put(store: EnvelopeStore, number: int = 1, fingerprint: bytes = FINGERPRINT) -> None:
    await store.put_if_absent(
        [BODY[:1000], BODY[1000:]],
        fingerprint=fingerprint,
        key=key(number),
        parent=key(0),
        index=7,
        tags=("a",),
    )


async def get(store: EnvelopeStore, number: int = 1, size: int = len(BODY)) -> tuple[Header | None, bytes]:
    buffer = bytearray(size)
    header = await store.get(FINGERPRINT, key(number), [memoryview(buffer)[:100], memoryview(buffer)[100:]])
    return header, bytes(buffer)


async def test_a_chunk_comes_back_with_what_it_says_about_itself(store):
    await put(store)
    header, body = await get(store)
    assert body == BODY
    assert header is not None
    assert (header.parent, header.index, header.ranks, header.tags) == (key(0), 7, 2, ("a",))
    assert (await get(store, 2))[0] is None


async def test_the_body_starts_on_a_page(store, tmp_path):
    await put(store)
    path = next(tmp_path.glob("??/*.kvist"))
    assert path.read_bytes()[HEADER_BYTES:] == BODY
    assert HEADER_BYTES == 4096


@given(position=st.integers(0, HEADER_BYTES + len(BODY) - 1), flip=st.integers(1, 255))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_byte_anywhere_is_noticed(tmp_path_factory, position, flip):
    import asyncio

    async def check() -> None:
        root = tmp_path_factory.mktemp("flip")
        with ThreadPoolExecutor(1) as threads:
            disk = await DiskStore.open(root, 1 << 24, "none", threads)
            store = EnvelopeStore(disk, threads)
            await put(store)
            path = next(root.glob("??/*.kvist"))
            data = bytearray(path.read_bytes())
            data[position] ^= flip
            path.write_bytes(data)
            with pytest.raises(IntegrityError):
                await get(store)
            await disk.close()

    asyncio.run(check())


@pytest.mark.parametrize(
    "length", [0, 1, 4095, 4096, 4097, HEADER_BYTES + len(BODY) - 1, HEADER_BYTES + len(BODY) + 1]
)
async def test_a_cut_or_grown_file_is_noticed(store, tmp_path, length):
    await put(store)
    path = next(tmp_path.glob("??/*.kvist"))
    path.write_bytes(path.read_bytes()[:length].ljust(length, b"\0"))
    with pytest.raises(IntegrityError):
        await get(store)
    found = [item async for item in store.scan()]
    assert isinstance(found[0][2], IntegrityError)


async def test_foreign_chunks_are_refused_by_name(store, tmp_path):
    await put(store, fingerprint=b"g" * 32)
    with pytest.raises(IntegrityError, match="fingerprint"):
        await get(store)
    with pytest.raises(IntegrityError, match="bytes, expected"):
        await store.get(b"g" * 32, key(1), [memoryview(bytearray(8))])


async def test_a_file_under_another_key_is_refused(store, tmp_path):
    await put(store)
    path = next(tmp_path.glob("??/*.kvist"))
    path.rename(path.with_name(key(2).hex() + ".kvist"))
    with pytest.raises(IntegrityError, match="holds the bytes of chunk"):
        await get(store, 2)


def test_a_newer_format_and_a_codec_are_not_guessed():
    header = Header(
        fingerprint=FINGERPRINT,
        key=key(1),
        parent=key(0),
        index=0,
        ranks=1,
        raw_bytes=1,
        stored_bytes=1,
        checksum=b"8" * 8,
    )
    packed = bytearray(pack_header(header))
    assert unpack_header(packed) == header
    packed[8] = 2
    with pytest.raises(IntegrityError, match="format 2"):
        unpack_header(packed)
    with pytest.raises(ValueError, match="tags"):
        pack_header(
            Header(**{f: getattr(header, f) for f in header.__struct_fields__} | {"tags": ("x" * 4000,)})
        )


async def test_a_scan_leaves_out_what_cannot_be_read_now(store):
    await put(store, 1)
    await put(store, 2)
    faulty = FaultyStore(store.inner, lambda operation, name: TierError("down") if name == key(1) else None)
    seen = [name async for name, _, _ in EnvelopeStore(faulty, store._threads).scan()]
    assert seen == [key(2)]
