"""kill -9 at every step of a write or a deletion leaves each chunk whole or not there, and nothing else."""

import asyncio
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.connector.faults.crashing_writer import LIMIT, NEW, OLD, content

from kvist_connector.testing.chunk_store import read_all
from kvist_connector.tiers.disk import DiskStore

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("crashing_writer.py")


async def killed_everywhere(folder, fsync, operation):
    """Folders of those that were killed, and the calls of the one that was not."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), str(folder), fsync, operation, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    assert process.returncode == 0
    lines = [line.split() for line in output.decode().splitlines()]
    dead = [Path(line[0]) for line in lines if line[1] == "killed"]
    return dead, next(line[2:] for line in lines if line[1] == "lived")


async def state(folder, key):
    """Whether the chunk is there, read by the next agent on the folder."""
    with ThreadPoolExecutor(1) as threads:
        store = await DiskStore.open(folder, LIMIT, "none", threads)
        length, data = await read_all(store, key, len(content(key)))
        assert length is None or (length, data) == (len(content(key)), content(key)), "a torn chunk is served"
        files = [path for path in folder.glob("??/*") if path.is_file()]
        assert (await store.capacity()).used == sum(path.stat().st_size for path in files)
        assert not [path for path in files if path.suffix == ".partial"], "an unfinished file stays"
        if length is None:
            assert await store.put_if_absent(key, [content(key)])
            assert await read_all(store, key, len(content(key))) == (len(content(key)), content(key))
        await store.close()
        return length is not None


@pytest.mark.parametrize(
    ("fsync", "operation", "calls"),
    [
        ("none", "put", ["mkdir", "open", "writev", "close", "rename"]),
        ("data", "put", ["mkdir", "open", "writev", "fdatasync", "close", "rename"]),
        # The head has the checksum of what was written before it.
        (
            "none",
            "put sealed",
            ["mkdir", "open", "lseek", "writev", "lseek", "writev", "close", "rename"],
        ),
    ],
)
async def test_a_write_killed_at_every_step_is_whole_or_not_there(tmp_path, fsync, operation, calls):
    dead, taken = await killed_everywhere(tmp_path, fsync, operation)
    assert taken == calls, "the write has other steps: name them here"
    assert len(dead) == 3 * len(calls)
    found = Counter()
    for folder in dead:
        assert await state(folder, OLD), "a chunk that was whole is lost"
        found[await state(folder, NEW)] += 1
    # Only what was killed after the rename is there.
    assert found == {True: 1, False: 3 * len(calls) - 1}


async def test_a_deletion_killed_at_every_step_is_whole_or_not_there(tmp_path):
    dead, taken = await killed_everywhere(tmp_path, "none", "delete")
    assert taken == ["unlink"]
    assert [await state(folder, OLD) for folder in dead] == [True, True, False]
