"""A stand-in for an agent: its feed, with frames that a test steers."""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvist_connector import names
from kvist_connector.protocol import feed
from kvist_connector.protocol.engine import EngineLoad, RequestRecord
from kvist_connector.protocol.framing import encode
from kvist_router.testing.server import LocalServer

BEAT_SECONDS = 0.5


class FakeAgent(LocalServer):
    """Serves `opening` and `snapshot` to every reader, then what a test sends, in sequence.

    `token`, when set, is asked of every request; `acknowledged` are the acknowledgements of drains, of
    which the first `deaf` are answered 500; `speeds` are its lower tiers, told with every load.
    """

    def __init__(self, opening: feed.Opening, snapshot: dict[int, list[bytes]] | None = None) -> None:
        super().__init__()
        self.opening = opening
        self.snapshot = snapshot or {}
        self.connections = 0
        self.token = ""
        self.deaf = 0
        self.speeds: tuple[feed.TierSpeed, ...] = ()
        self.queries: list[dict[str, str]] = []
        self.acknowledged: list[dict[str, object]] = []
        self._readers: dict[asyncio.Queue[bytes | None], int] = {}

    def application(self) -> web.Application:
        """See LocalServer."""
        app = web.Application()
        app.router.add_get(names.PATH_FEED, self._feed)
        app.router.add_post(names.PATH_DRAIN_ACKNOWLEDGE, self._acknowledge)
        return app

    def delta(self, tier: int, added: list[bytes], removed: list[bytes] | None = None) -> None:
        """Keys came or went."""
        self._push(
            lambda sequence: feed.Delta(
                sequence=sequence, tier=tier, added=b"".join(added), removed=b"".join(removed or [])
            )
        )

    def record(self, record: RequestRecord) -> None:
        """A request's prefill ended."""
        self._push(lambda sequence: feed.Record(sequence=sequence, record=record))

    def load(self, load: EngineLoad) -> None:
        """The engine's load changed."""
        self._push(lambda sequence: self._load(sequence, load))

    def state(self, gpu_known: bool, draining: bool) -> None:
        """A flag changed."""
        self._push(lambda sequence: feed.State(sequence=sequence, gpu_known=gpu_known, draining=draining))

    def skip(self) -> None:
        """Leave a gap in the sequence."""
        for queue in self._readers:
            self._readers[queue] += 1

    def raw(self, data: bytes) -> None:
        """Send bytes that may be no frame."""
        for queue in self._readers:
            queue.put_nowait(data)

    def end(self) -> None:
        """End every stream."""
        for queue in self._readers:
            queue.put_nowait(None)

    def _push(self, build: object) -> None:
        assert callable(build)
        for queue in self._readers:
            self._readers[queue] += 1
            queue.put_nowait(encode(build(self._readers[queue])))

    def _allowed(self, request: web.Request) -> bool:
        return not self.token or request.headers.get("Authorization") == f"Bearer {self.token}"

    async def _acknowledge(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return web.Response(status=401)
        if self.deaf:
            self.deaf -= 1
            return web.Response(status=500)
        self.acknowledged.append(await request.json())
        return web.json_response({"counted": True})

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        if not self._allowed(request):
            return web.Response(status=401)
        self.connections += 1
        self.queries.append(dict(request.query))
        response = web.StreamResponse(headers={"content-type": feed.CONTENT_TYPE})
        await response.prepare(request)
        await response.write(encode(self.opening))
        parts = list(self.snapshot.items()) or [(1, [])]
        for number, (tier, keys) in enumerate(parts, 1):
            last = number == len(parts)
            part = feed.Snapshot(sequence=number, tier=tier, keys=b"".join(keys), last=last)
            await response.write(encode(part))
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(1000)
        self._readers[queue] = len(parts)
        try:
            while (data := await self._next(queue)) is not None:
                await response.write(data)
        finally:
            del self._readers[queue]
        return response

    async def _next(self, queue: asyncio.Queue[bytes | None]) -> bytes | None:
        try:
            return await asyncio.wait_for(queue.get(), BEAT_SECONDS)
        except TimeoutError:
            self._readers[queue] += 1
            return encode(self._load(self._readers[queue], EngineLoad()))

    def _load(self, sequence: int, load: EngineLoad) -> feed.Load:
        return feed.Load(
            sequence=sequence, load=load, speeds=self.speeds, chunk_bytes=0, engine_connected=True
        )
