"""Past the page cache: the contract, the same bytes whatever lies where, and that it is really done."""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.errors import ConfigError
from kvist_connector.testing.chunk_store import ChunkStoreSuite, key
from kvist_connector.tiers import direct
from kvist_connector.tiers.base import Read
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.envelope import EnvelopeStore

PAGE = direct.ALIGNMENT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not direct.is_possible(tmp_path):
        pytest.skip("the file system of the test folder has no direct I/O")
    return tmp_path


async def opened(folder: Path, threads: ThreadPoolExecutor, past: bool) -> DiskStore:
    return await DiskStore.open(folder, 1 << 24, "none", threads, direct=past)


def buffer(size: int, offset: int = 0) -> memoryview:
    """Room at so many bytes after the start of a page."""
    return memoryview(mmap.mmap(-1, size + PAGE))[offset : offset + size]


class TestDiskDirect(ChunkStoreSuite):
    @pytest.fixture
    async def store(self, folder, threads):
        store = await opened(folder, threads, True)
        yield store
        await store.close()


@pytest.fixture
def flags(monkeypatch):
    """Flags of every file that is opened."""
    seen, real = [], os.open

    def watched(path, how, *more, **named):
        seen.append(how)
        return real(path, how, *more, **named)

    monkeypatch.setattr(os, "open", watched)
    return seen


async def test_a_whole_chunk_goes_past_the_page_cache_both_ways(folder, threads, flags):
    store = await opened(folder, threads, True)
    chunks = EnvelopeStore(store, threads)
    data, into = buffer(6 * PAGE), buffer(6 * PAGE)
    data[:] = os.urandom(data.nbytes)
    flags.clear()
    await chunks.put_if_absent([data], fingerprint=b"f" * 32, key=key(1), parent=key(0), index=0)
    assert await chunks.get(b"f" * 32, key(1), [into]) is not None
    assert into == data
    assert [bool(how & os.O_DIRECT) for how in flags] == [True, True]
    await store.close()


@pytest.mark.parametrize(("size", "offset"), [(6 * PAGE - 1, 0), (100 * PAGE, 8)])
async def test_what_is_no_whole_pages_goes_through_the_page_cache(folder, threads, flags, size, offset):
    store = await opened(folder, threads, True)
    data, into = buffer(size, offset), buffer(size, offset)
    data[:] = os.urandom(size)
    flags.clear()
    assert await store.put_if_absent(key(1), [data])
    assert await store.get(Read(key(1), [into])) == size
    assert into == data
    assert not any(how & os.O_DIRECT for how in flags)
    await store.close()


@given(
    parts=st.lists(
        st.tuples(st.sampled_from([1, 100, PAGE, 3 * PAGE]), st.sampled_from([0, 1, 512])),
        min_size=1,
        max_size=4,
    ),
    offset=st.sampled_from([0, 8]),
    wanted=st.integers(1, 14 * PAGE),
    whole=st.booleans(),
)
async def test_both_ways_write_and_read_the_same_bytes(tmp_path_factory, parts, offset, wanted, whole):
    folder = tmp_path_factory.mktemp("direct")
    if not direct.is_possible(folder):
        pytest.skip("the file system of the test folder has no direct I/O")
    views = [buffer(size, at) for size, at in parts]
    for view in views:
        view[:] = os.urandom(view.nbytes)
    data = b"".join(views)
    wanted = -(-wanted // PAGE) * PAGE if whole else wanted
    with ThreadPoolExecutor(1) as threads:
        for number, past in enumerate((True, False)):
            store = await opened(folder, threads, past)
            assert await store.put_if_absent(key(number), views)
            for name in range(number + 1):
                into = buffer(wanted, offset)
                assert await store.get(Read(key(name), [into])) == len(data)
                assert into[: len(data)] == data[:wanted]
            await store.close()


async def test_a_file_system_without_it_is_refused_in_words_and_the_folder_let_go(
    tmp_path, threads, monkeypatch
):
    monkeypatch.setattr("kvist_connector.tiers.disk_folder.is_possible", lambda folder: False)
    with pytest.raises(ConfigError, match=r"disk\.direct: the file system of .* leave it off"):
        await opened(tmp_path, threads, True)
    await (await opened(tmp_path, threads, False)).close()
