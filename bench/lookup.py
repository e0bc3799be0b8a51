"""Lookup of a 128k-token prompt in an agent that knows a million chunks, and what a chunk costs the agent.

    python -m bench.lookup [--chunks N]

One connection sends lookups of 512 keys through the agent's socket, a hundred a second (more than engines
that prefill such prompts could), and waits until it has decoded the answer, in a thread that sleeps in the
kernel as an engine's does; chunks are 64 bytes large, since only the books are measured. Their peer is the
floor: a message of the same size that comes back from an echo through a socket of the same kind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Self

from bench import harness
from bench.agent_process import AgentProcess
from kvist_connector.arena.geometry import HEADER_BYTES
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.framing import FrameDecoder, encode
from kvist_connector.testing.fake_engine import FakeEngine, layout

CHUNKS: Final = 1_000_000
KEYS: Final = 512  # 128k tokens in chunks of 256
CHUNK_BYTES: Final = 64
PAUSE: Final = 0.01  # seconds
DEADLINE: Final = 20.0
GOAL_P99: Final = 0.001
GOAL_BYTES: Final = 2048
_ROOT: Final = bytes(16)


def run(options: harness.Options) -> harness.Result:
    """Fill, then look up whole prompts, unknown ones and halves in turn."""
    chunks = options.extra.chunks or (CHUNKS if not options.quick else 50_000)
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        memory = int((chunks + 4096) * (CHUNK_BYTES + HEADER_BYTES) * 1.15)
        with AgentProcess(Path(folder), memory=str(memory), records=False) as agent:
            return asyncio.run(_measure(agent, chunks, options.rounds(1000, 200)))


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
    with _Asker(agent.socket) as asker:
        times = {name: await asyncio.to_thread(asker.ask, given) for name, given in asked.items()}
    async with _echo(Path(agent.folder) / "echo") as path:
        times["echo of as many bytes"] = await asyncio.to_thread(_echoed, path, rounds)
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


class _Asker:
    """A scheduler half that does nothing but look up."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(DEADLINE)
        self._socket.connect(str(path))
        self._decoder: FrameDecoder[wire.ToEngine] = FrameDecoder(wire.ToEngine)
        self._send(
            wire.Hello(protocol=1, role="scheduler", engine="b", member="s-b", rank=0, pid=os.getpid())
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, prompts: Sequence[Sequence[bytes]]) -> list[float]:
        """Seconds until the answer to each is decoded."""
        taken = []
        for keys in prompts:
            joined = b"".join(keys)
            began = time.perf_counter()
            self._send(wire.Lookup(request="r", keys=joined, tokens=8 * len(keys)))
            self._answer()
            taken.append(time.perf_counter() - began)
            self._send(wire.Step(releases=("r",)))
            time.sleep(PAUSE)
        return taken

    def _send(self, message: wire.Message) -> None:
        self._socket.sendall(encode(message))

    def _answer(self) -> None:
        while True:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionError("the agent closed the connection")
            if any(isinstance(message, wire.Answer) for message in self._decoder.feed(data)):
                return


@asynccontextmanager
async def _echo(path: Path) -> AsyncIterator[Path]:
    async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async with await asyncio.start_unix_server(back, str(path)):
        yield path
    os.unlink(path)


def _echoed(path: Path, rounds: int) -> list[float]:
    data, taken = bytes(16 * KEYS), []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ours:
        ours.settimeout(DEADLINE)
        ours.connect(str(path))
        for _ in range(rounds):
            began = time.perf_counter()
            ours.sendall(data)
            ours.recv(len(data), socket.MSG_WAITALL)
            taken.append(time.perf_counter() - began)
            time.sleep(PAUSE)
    return taken


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
