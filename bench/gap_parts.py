"""Parts of bench.gap that need processes of their own: an engine that streams at a steady pace, a busy feed.

python -m bench.gap_parts engine --port 9100    a piece every 20 ms, to every request
python -m bench.gap_parts feed --port 9200      an agent's feed, steered by POST /rate and /snapshot
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import uvloop
from aiohttp import web

from bench.mock_engine import MODEL, PIECE
from bench.openings import opening
from kvist_connector import names
from kvist_connector.protocol import feed
from kvist_connector.protocol.engine import EngineLoad
from kvist_connector.protocol.framing import encode
from kvist_connector.protocol.tiers import Tier

PACE_SECONDS, PIECES = 0.02, 200
KEY_BYTES = 16
KEYS = 200_000  # of the snapshot
PART_KEYS = 4096  # as agents send it
DELTA_KEYS = 16  # chunks of 4,096 tokens, as a prompt's end brings them
TICK_SECONDS, BEAT_SECONDS = 0.01, 0.5
FINGERPRINT = b"gap bench" * 3


class Engine:
    """Streams."""

    def application(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", _empty)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._stream)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "max_model_len": 131072}
        return web.json_response({"object": "list", "data": [card]})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        due = time.monotonic()
        with contextlib.suppress(ConnectionError):  # its client leaves when the trial is over
            for _ in range(PIECES):
                await response.write(PIECE)
                due += PACE_SECONDS
                await asyncio.sleep(due - time.monotonic())
        return response


class Feed:
    """One agent's feed: a snapshot of KEYS keys, then keys that come and go at `rate` a second."""

    def __init__(self) -> None:
        self._rate, self._sent = 0.0, 0
        self._again = asyncio.Event()
        keys = [number.to_bytes(KEY_BYTES, "little") for number in range(KEYS)]
        self._snapshot = [b"".join(keys[at : at + PART_KEYS]) for at in range(0, KEYS, PART_KEYS)]
        self._groups = [b"".join(keys[at : at + DELTA_KEYS]) for at in range(0, KEYS, DELTA_KEYS)]

    def application(self) -> web.Application:
        """Its routes."""
        app = web.Application()
        app.router.add_get(names.PATH_FEED, self._feed)
        app.router.add_post("/rate", self._set_rate)
        app.router.add_post("/snapshot", self._new_snapshot)
        app.router.add_get("/sent", self._count)
        app.router.add_post(names.PATH_RETIRED, self._retired)
        return app

    async def _retired(self, _: web.Request) -> web.Response:
        return web.json_response({"retired": {"epoch": 0, "rules": {}}})

    async def _set_rate(self, request: web.Request) -> web.Response:
        self._rate = float(request.query["keys"])
        return web.Response()

    async def _new_snapshot(self, _: web.Request) -> web.Response:
        self._again.set()
        return web.Response()

    async def _count(self, _: web.Request) -> web.Response:
        return web.json_response({"keys": self._sent})

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        self._again.clear()
        response = web.StreamResponse(headers={"content-type": feed.CONTENT_TYPE})
        await response.prepare(request)
        sequence = await self._open(response.write)
        beat, due = 0.0, time.monotonic()
        while not self._again.is_set():
            frames = b""
            for _ in range(round(self._rate * TICK_SECONDS / DELTA_KEYS)):
                sequence += 1
                frames += self._delta(sequence)
            if time.monotonic() > beat:
                sequence, beat = sequence + 1, time.monotonic() + BEAT_SECONDS
                load = feed.Load(
                    sequence=sequence, load=EngineLoad(), speeds=(), chunk_bytes=0, engine_connected=True
                )
                frames += encode(load)
            try:
                await response.write(frames)
            except ConnectionResetError:
                break  # the router has ended
            due = max(due + TICK_SECONDS, time.monotonic() - 1.0)
            await asyncio.sleep(due - time.monotonic())
        return response

    async def _open(self, write: Callable[[bytes], Awaitable[None]]) -> int:
        await write(encode(opening("r", MODEL, FINGERPRINT, gpu_known=False)))
        for number, keys in enumerate(self._snapshot, 1):
            last = number == len(self._snapshot)
            await write(encode(feed.Snapshot(sequence=number, tier=Tier.MEMORY, keys=keys, last=last)))
        return len(self._snapshot)

    def _delta(self, sequence: int) -> bytes:
        """A group goes when it was there, and comes when it was not."""
        at, again = sequence % len(self._groups), sequence // len(self._groups) % 2
        keys = self._groups[at]
        self._sent += DELTA_KEYS
        added, removed = (keys, b"") if again else (b"", keys)
        return encode(feed.Delta(sequence=sequence, tier=Tier.MEMORY, added=added, removed=removed))


async def _empty(_: web.Request) -> web.Response:
    return web.Response()


async def serve(app: web.Application, port: int) -> None:
    """Listen until the process ends."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def _main(role: str, port: int) -> None:
    await serve((Engine() if role == "engine" else Feed()).application(), port)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("engine", "feed"))
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    uvloop.run(_main(given.role, given.port))
