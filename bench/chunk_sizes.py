"""What the size of a chunk changes: copies, files, keys, lookups, and tokens lost at a prompt's end."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from bench.arena_rig import TOKEN_BYTES, Pages, rig
from bench.harness import Table, estimate
from kvist_connector.agent.catalog import Catalog
from kvist_connector.keys import chunk_keys, split_keys
from kvist_connector.protocol.engine import Answer, SlotRef
from kvist_connector.protocol.framing import encode
from kvist_connector.protocol.tiers import Tier
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.envelope import EnvelopeStore

SIZES: Final = (16, 64, 256, 1024, 4096)
PROMPT: Final = 131_072  # tokens of the prompt that is looked up
_AT_ONCE: Final = 8
_FINGERPRINT: Final = b"s" * 32


def table(folder: Path, pages: Pages, tokens: int, rounds: int, figures: dict[str, float]) -> Table:
    """One row a size. `pages` are for `tokens` tokens; larger chunks get their own."""
    rows = []
    for size in SIZES:
        moved = max(size, tokens)
        used = pages if moved == tokens else Pages.make(moved)
        megabytes = moved * TOKEN_BYTES / 1e6
        store, load = _copies(folder, used, size, moved, rounds)
        put, get = asyncio.run(_files(size, moved, rounds))
        keys, lookup = _lookup(size, rounds)
        speeds = [megabytes / taken for taken in (store, load, put, get)]
        names = ("store", "load", "disk put", "disk get")
        figures |= {f"{size} tokens, {name} MB/s": one for name, one in zip(names, speeds, strict=True)}
        figures |= {f"{size} tokens, lookup ms": 1e3 * lookup}
        rows.append(
            (
                f"{size:,}",
                f"{size * TOKEN_BYTES / 2**20:,.0f}",
                *(f"{one:,.0f}" for one in speeds),
                f"{PROMPT // size:,}",
                f"{1e3 * keys:.1f}",
                f"{1e3 * lookup:.2f}",
                f"{size / 2:,.0f}",
            )
        )
    return Table(
        "Chunk size, at 64 KiB a token",
        ("tokens", "MiB", "store MB/s", "load", "disk put", "disk get",
         "chunks of 128k tokens", "keys ms", "lookup ms", "tokens lost"),
        tuple(rows),
        "Scattered pages. Disk: 8 files at a time through the envelope, from the page cache. Keys and lookup"
        " of 128k tokens: processor time of the engine, and of the agent. Tokens lost: half a chunk is"
        " computed again at a prompt's end on average, since only full chunks are kept. An agent needs about"
        " a kilobyte of its own for each chunk. Copies hardly depend on the size. What falls with it is the"
        " work for each chunk, small against a load from 256 tokens on; what grows is what is lost.",
    )  # fmt: skip


def seconds(work: Callable[[], object]) -> float:
    """That it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _copies(folder: Path, pages: Pages, size: int, tokens: int, rounds: int) -> tuple[float, float]:
    with rig(folder / "sweep", pages, size, tokens) as used:
        pieces = used.pieces(True)
        times = [(used.store(pieces), used.load(pieces)) for _ in range(rounds + 1)][1:]
    return estimate([store for store, _ in times]).median, estimate([load for _, load in times]).median


async def _files(size: int, tokens: int, rounds: int) -> tuple[float, float]:
    data = memoryview(bytes(size * TOKEN_BYTES))
    into = [memoryview(bytearray(size * TOKEN_BYTES)) for _ in range(_AT_ONCE)]
    puts, gets = [], []
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as name, ThreadPoolExecutor(4) as threads:
        store = EnvelopeStore(await DiskStore.open(Path(name) / "disk", 1 << 40, "none", threads), threads)

        async def put(key: bytes, _: memoryview) -> None:
            await store.put_if_absent([data], fingerprint=_FINGERPRINT, key=key, parent=bytes(16), index=0)

        async def get(key: bytes, target: memoryview) -> None:
            await store.get(_FINGERPRINT, key, [target])

        for number in range(rounds):
            keys = [bytes([number]) + index.to_bytes(15, "big") for index in range(tokens // size)]
            puts.append(await _each(keys, into, put))
            gets.append(await _each(keys, into, get))
            for key in keys:
                await store.delete(_FINGERPRINT, key)
        await store.inner.close()
    return estimate(puts).median, estimate(gets).median


async def _each(
    keys: Sequence[bytes],
    buffers: Sequence[memoryview],
    act: Callable[[bytes, memoryview], Awaitable[None]],
) -> float:
    """Seconds for all keys, as many at a time as there are buffers."""
    queue = iter(keys)

    async def work(buffer: memoryview) -> None:
        for key in queue:
            await act(key, buffer)

    began = time.perf_counter()
    await asyncio.gather(*map(work, buffers))
    return time.perf_counter() - began


def _lookup(size: int, rounds: int) -> tuple[float, float]:
    """Seconds for the keys of a long prompt, and for what an agent does until it answers."""
    tokens = list(range(PROMPT))
    derived = estimate([seconds(lambda: chunk_keys(bytes(16), tokens, size)) for _ in range(rounds)]).median
    keys = chunk_keys(bytes(16), tokens, size)
    catalog = Catalog("cost")
    for index, key in enumerate(keys):
        parent = keys[index - 1] if index else bytes(16)
        catalog.enter_memory(key, parent, index, size * TOKEN_BYTES, SlotRef(index, 1), 0.0)
    joined = b"".join(keys)
    return derived, estimate([seconds(lambda: _answer(catalog, joined)) for _ in range(rounds)]).median


def _answer(catalog: Catalog, joined: bytes) -> None:
    found = catalog.leading(split_keys(joined))
    hold = catalog.hold(found)
    refs = tuple(chunk.ref for chunk in found if chunk.ref is not None)
    encode(
        Answer(request="r", refs=refs, tiers=bytes([Tier.MEMORY]) * len(refs), known=len(refs), pending=False)
    )
    for chunk in catalog.ended(hold):
        catalog.unlease(chunk)
