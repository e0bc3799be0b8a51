"""Copies between an engine's pages and the arena, against memcpy and LMCache's server; sizes of chunks.

    python -m bench.arena [--json FILE] [--check] [--quick] [--lmcache PROGRAM]

128 MiB, 2,048 tokens at 64 KiB each, through the code that the worker runs. The limit is one numpy memcpy of
as many bytes between the same two mappings, measured in the same round; both sides copy on one thread. Pages
lie side by side, as a fresh engine allocates them, or scattered, as one does that has evicted. LMCache's
figures are those of its own `bench server`; ours beside them include the messages to an agent process and
back that a store or a load takes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bench import chunk_sizes, harness, lmcache
from bench.agent_copies import AgentCopies
from bench.agent_process import AgentProcess
from bench.arena_rig import LAYERS, PAGE_BYTES, Bytes, Pages, Rig, rig
from bench.harness import Goal, Options, Result, Table
from kvist_connector.keys import CHUNK_TOKENS
from kvist_connector.transfer.plan import Piece

GOAL: Final = 0.8  # of memcpy's speed
PEER_GOAL: Final = 0.5  # of LMCache's time
TOKENS: Final = 2048
LMCACHE_SHAPE: Final = "(2,512,16,8,128):float16:16"
_MIB: Final = TOKENS * 64 // 1024


def run(options: Options) -> Result:
    """Store and load of 128 MiB; chunk sizes; other ways to move scattered pages."""
    goals: list[Goal] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="kvist-bench-", dir="/dev/shm") as name:
        folder = Path(name)
        pages = Pages.make(TOKENS)
        with rig(folder / "arena", pages, CHUNK_TOKENS, TOKENS) as used:
            tables = [
                against_memcpy(used, options.rounds(30, 5), goals, figures),
                ways(used, options.rounds(15, 3), figures),
            ]
        tables.append(chunk_sizes.table(folder, pages, TOKENS, options.rounds(9, 3), figures))
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as name:
        tables.append(against_lmcache(Path(name), pages, options, goals, figures))
    worst = min(goal.value for goal in goals if goal.at_least)
    return Result(
        f"copies run at {worst:.0%} of memcpy's speed or better; store {figures['agent store ms']:.0f} ms, "
        f"load {figures['agent load ms']:.0f} ms of {_MIB} MiB with all messages",
        tuple(tables),
        figures,
        tuple(goals),
        () if options.extra.lmcache else (lmcache.ABSENT,),
    )


def against_memcpy(used: Rig, rounds: int, goals: list[Goal], figures: dict[str, float]) -> Table:
    """Pairs of our copy and memcpy's."""
    rows = []
    for storing in (True, False):
        for scattered in (False, True):
            label = f"{'store' if storing else 'load'}, {'scattered' if scattered else 'side by side'}"
            ours = _copy(used, storing, used.pieces(scattered))
            ratio, memcpy, mine = harness.paired_ratio(
                lambda storing=storing: used.memcpy(storing),  # type: ignore[misc]
                ours,
                rounds,
            )
            cells = [f"{harness.estimate(taken).median * 1e3:.1f} ms" for taken in (mine, memcpy)]
            rows.append((label, *cells, f"{ratio.median:.2f}"))
            interval = (ratio.low, ratio.high)
            goals.append(
                Goal(
                    f"{label}: share of memcpy's speed", ratio.median, GOAL, at_least=True, interval=interval
                )
            )
            figures[label] = ratio.median
    return Table(
        f"{used.view.geometry.slots} chunks, {_MIB} MiB, one thread",
        ("copy", "Kvist", "memcpy", "share of its speed"),
        tuple(rows),
    )


def ways(used: Rig, rounds: int, figures: dict[str, float]) -> Table:
    """Scattered pages by way of a staging buffer, and page by page."""
    pieces = used.pieces(True)
    staging = np.zeros(used.size, dtype=np.uint8)  # its pages are touched
    others: dict[str, Callable[[bool], None]] = {
        "by way of a staging buffer": lambda storing: _staged(used, pieces, staging, storing),
        "page by page": lambda storing: _page_by_page(used, pieces, storing),
    }
    rows = []
    for name, way in others.items():
        cells = [name]
        for storing in (True, False):
            way(storing)
            ratio, _, theirs = harness.paired_ratio(
                _copy(used, storing, pieces),
                lambda way=way, storing=storing: chunk_sizes.seconds(lambda: way(storing)),  # type: ignore[misc]
                rounds,
            )
            cells += [f"{harness.estimate(theirs).median * 1e3:.1f} ms", f"{1 / ratio.median:.2f}"]
            figures[f"{name}, {'store' if storing else 'load'}"] = 1 / ratio.median
        rows.append(tuple(cells))
    columns = ("scattered pages", "store", "times ours", "load", "times ours")
    note = "Ours gathers a layer of a chunk in one call, straight into its slot."
    return Table("Other ways", columns, tuple(rows), note)


def against_lmcache(
    folder: Path, pages: Pages, options: Options, goals: list[Goal], figures: dict[str, float]
) -> Table:
    """Through an agent process, and LMCache's server with as many bytes."""
    rounds = options.rounds(20, 5)
    with AgentProcess(folder, memory="1Gi") as agent:
        ours = asyncio.run(_through_agent(agent, pages, rounds))
    figures |= {f"agent {way} ms": 1e3 * harness.estimate(taken).median for way, taken in ours.items()}
    program = options.extra.lmcache
    theirs = lmcache.server_bench(program, folder, TOKENS, LMCACHE_SHAPE, rounds) if program else {}
    rows = []
    for way, taken in ours.items():
        mine, cells = harness.estimate(taken), ["", ""]
        if way in theirs:
            bounds = (mine.low / theirs[way], mine.high / theirs[way])
            share = mine.median / theirs[way]
            cells = [f"{1e3 * theirs[way]:.1f} ms", f"{share:.2f}"]
            goals.append(Goal(f"{way}: share of LMCache's time", share, PEER_GOAL, interval=bounds))
        rows.append((way, f"{1e3 * mine.median:.1f} ms", *cells))
    return Table(
        f"{_MIB} MiB between processes, messages included",
        ("copy", "Kvist", f"LMCache {lmcache.VERSION}", "share of its time"),
        tuple(rows),
        "LMCache: `lmcache bench server --mode cpu --transfer-mode lmcache_driven`, cold store and warm"
        " retrieve, p50. Ours: a store ends when a lookup finds all chunks, a load begins with the lookup.",
    )


async def _through_agent(agent: AgentProcess, pages: Pages, rounds: int) -> dict[str, list[float]]:
    copies = await AgentCopies.start(agent.socket, pages)
    taken: dict[str, list[float]] = {"store": [], "load": []}
    try:
        for number in range(rounds + 1):
            keys = await copies.prompt(number, TOKENS)
            found = [await copies.store(keys), await copies.load(keys)]
            if number:  # the first touches the pages
                for way, one in zip(taken.values(), found, strict=True):
                    way.append(one)
    finally:
        await copies.stop()
    return taken


def _copy(used: Rig, storing: bool, moved: list[Piece]) -> Callable[[], float]:
    act = used.store if storing else used.load
    act(moved)  # the first copy of a page pays for its faults
    return lambda: act(moved)


def _staged(used: Rig, pieces: Sequence[Piece], staging: Bytes, storing: bool) -> None:
    """Two copies: pages and staging, staging and slots."""
    rows, slots = used.pages.rows(), used.view.slots
    buffer = staging.reshape(slots.shape)
    if not storing:
        np.copyto(buffer, slots)
    for piece in pieces:
        numbers = np.asarray(piece.pages, dtype=np.intp)
        for layer in range(LAYERS):
            part = buffer[piece.slot, layer].reshape(len(piece.pages), PAGE_BYTES)
            if storing:
                np.take(rows[layer], numbers, axis=0, out=part, mode="clip")
            else:
                rows[layer][numbers] = part
    if storing:
        np.copyto(slots, buffer)


def _page_by_page(used: Rig, pieces: Sequence[Piece], storing: bool) -> None:
    rows, slots = used.pages.rows(), used.view.slots
    for piece in pieces:
        for layer in range(LAYERS):
            part = slots[piece.slot, layer].reshape(len(piece.pages), PAGE_BYTES)
            for block, page in enumerate(piece.pages):
                if storing:
                    part[block] = rows[layer, page]
                else:
                    rows[layer, page] = part[block]


def _arguments(parser: argparse.ArgumentParser) -> None:
    lmcache.add_argument(parser)


if __name__ == "__main__":
    sys.exit(harness.main("arena", run, _arguments))
