"""Lookup of a 128k-token prompt in an agent that knows a million chunks, and what a chunk costs the agent.

    python -m bench.lookup [--chunks N]

One connection sends lookups of 512 keys through the agent's socket, a hundred a second (more than engines
that prefill such prompts could), and waits for each answer; chunks are 64 bytes large, since only the books
are measured. Their peer is the floor: a message of the same size that comes back from an echo through a
socket of the same kind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from bench import harness
from bench.agent_process import AgentProcess
from kvist_connector.arena.geometry import HEADER_BYTES
from kvist_connector.protocol import engine as wire
from kvist_connector.testing.fake_engine import FakeEngine, layout

CHUNKS: Final = 1_000_000
KEYS: Final = 512  # 128k tokens in chunks of 256
CHUNK_BYTES: Final = 64
PAUSE: Final = 0.01  # seconds
GOAL_P99: Final = 0.001
GOAL_BYTES: Final = 2048
_ROOT: Final = bytes(16)


def run(options: harness.Options) -> harness.Result:
    """Fill, then look up whole prompts, unknown ones and halves in turn."""
    chunks = options.extra.chunks or (CHUNKS if not options.quick else 50_000)
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        memory = int((chunks + 4096) * (CHUNK_BYTES + HEADER_BYTES) * 1.15)
        with AgentProcess(Path(folder), memory=str(memory)) as agent:
            return asyncio.run(_measure(agent, chunks, options.rounds(2000, 200)))


async def _measure(agent: AgentProcess, chunks: int, rounds: int) -> harness.Result:
    engine = await FakeEngine.start(agent.socket, layout(layers=1, layer_bytes=CHUNK_BYTES))
    draw = random.Random(1)
    before = agent.private_bytes()
    prompts = [[draw.randbytes(16) for _ in range(KEYS)] for _ in range(chunks // KEYS)]
    for prompt in prompts:
        await _commit(engine, prompt)
    each = (agent.private_bytes() - before) / (len(prompts) * KEYS)
    asked = {
        "all 512 known": [draw.choice(prompts) for _ in range(rounds)],
        "the first 256 known": [
            draw.choice(prompts)[: KEYS // 2] + [draw.randbytes(16) for _ in range(KEYS // 2)]
            for _ in range(rounds)
        ],
        "none known": [[draw.randbytes(16) for _ in range(KEYS)] for _ in range(rounds)],
    }
    times = {name: [await _lookup(engine, keys) for keys in given] for name, given in asked.items()}
    async with _echo(Path(agent.folder) / "echo") as (reader, writer):
        times["echo of as many bytes"] = [await _echoed(reader, writer) for _ in range(rounds)]
    await engine.stop()
    return _result(times, len(prompts) * KEYS, each)


async def _commit(engine: FakeEngine, prompt: Sequence[bytes]) -> None:
    done = 0
    while done < len(prompt):
        refs = await engine.grant(1)
        refs += [ref for grant in engine.scheduler.received(wire.Grant) for ref in grant.refs]
        refs += engine.granted
        engine.granted = refs[len(prompt) - done :]
        commits = []
        for ref in refs[: len(prompt) - done]:
            parent = prompt[done - 1] if done else _ROOT
            commits.append(wire.Commit(ref=ref, key=prompt[done], parent=parent, index=done))
            done += 1
        engine.scheduler.send(wire.Step(commits=tuple(commits)))


async def _lookup(engine: FakeEngine, keys: Sequence[bytes]) -> float:
    joined = b"".join(keys)
    began = time.perf_counter()
    engine.scheduler.send(wire.Lookup(request="r", keys=joined, tokens=8 * len(keys)))
    await engine.scheduler.expect(wire.Answer)
    taken = time.perf_counter() - began
    engine.scheduler.send(wire.Step(releases=("r",)))
    await asyncio.sleep(PAUSE)
    return taken


@asynccontextmanager
async def _echo(path: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async with await asyncio.start_unix_server(back, str(path)):
        reader, writer = await asyncio.open_unix_connection(str(path))
        yield reader, writer
        writer.close()
        await writer.wait_closed()
    os.unlink(path)


async def _echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    data = bytes(16 * KEYS)
    began = time.perf_counter()
    writer.write(data)
    await reader.readexactly(len(data))
    return time.perf_counter() - began


def _result(times: dict[str, list[float]], chunks: int, each: float) -> harness.Result:
    rows = tuple(
        (name, *(f"{1000 * harness.percentile(taken, share):.3f}" for share in (0.5, 0.99)))
        for name, taken in times.items()
    )
    worst = max(harness.percentile(taken, 0.99) for name, taken in times.items() if "known" in name)
    table = harness.Table(
        f"Lookup of {KEYS} keys among {chunks:,} chunks", ("keys", "p50 ms", "p99 ms"), rows
    )
    return harness.Result(
        headline=f"{KEYS} keys among {chunks:,} chunks: p99 {1000 * worst:.2f} ms; {each:.0f} bytes a chunk",
        tables=(table,),
        figures={"p99_s": worst, "bytes_per_chunk": each, "p50_s": statistics.median(times["all 512 known"])},
        goals=(
            harness.Goal("lookup p99", 1000 * worst, 1000 * GOAL_P99, unit=" ms"),
            harness.Goal("agent's own memory a chunk", each, GOAL_BYTES, unit=" bytes"),
        ),
    )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chunks", type=int, metavar="N", help=f"chunks that the agent knows; default {CHUNKS}"
    )


if __name__ == "__main__":
    sys.exit(harness.main("lookup", run, _arguments))
