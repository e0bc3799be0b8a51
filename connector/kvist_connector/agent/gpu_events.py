"""Receives the engine's KV events over ZMQ and keeps the GPU index honest about what it missed.

Each message has a sequence number. A gap is filled from the engine's replay endpoint; without
one, or when its buffer no longer reaches back, residency is unknown until the cache is empty
again. Sequence 0 is a new engine.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import zmq
import zmq.asyncio

from kvist_connector.agent.gpu_index import Batch, GpuIndex

log = logging.getLogger(__name__)
REPLAY_SECONDS = 5.0
_HIGH_WATER = 100_000
_END = (-1).to_bytes(8, "big", signed=True)


class GpuEvents:
    """`run` is the background task."""

    def __init__(self, endpoint: str, replay: str | None, index: GpuIndex) -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay
        self._index = index
        self._decoder = msgspec.msgpack.Decoder(Batch)
        self._next: int | None = None
        self._engine = ""
        self._asked = asyncio.Event()
        self._replaying = asyncio.Lock()
        self._context = zmq.asyncio.Context()
        self.gaps = 0
        self.undecodable = 0

    def engine_arrived(self, engine: str) -> None:
        """A scheduler half connected. A new engine starts empty; which one it is, replay tells."""
        if engine and engine == self._engine:
            return
        self._engine = engine
        self._next = None
        self._index.distrust()
        self._asked.set()

    async def run(self) -> None:
        """Receive for ever."""
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        socket.subscribe(b"")
        asked = asyncio.create_task(self._answer_arrivals())
        try:
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3:
                    await self._receive(int.from_bytes(frames[1], "big"), frames[2])
        finally:
            asked.cancel()
            socket.close()

    def close(self) -> None:
        """Release the sockets' context."""
        self._context.destroy(linger=0)

    async def _answer_arrivals(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._catch_up()

    async def _receive(self, sequence: int, payload: bytes) -> None:
        if sequence == 0:
            self._index.restart()
        elif self._next is None or sequence > self._next:
            self.gaps += 1
            await self._catch_up()
            if self._next is None or sequence != self._next:
                if self._next is None or sequence > self._next:
                    self._index.distrust()
                    self._next = sequence + 1
                return
        elif sequence < self._next:
            return  # came by replay already
        self._apply(sequence, payload)

    def _apply(self, sequence: int, payload: bytes) -> None:
        self._next = sequence + 1
        try:
            batch = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            if not self.undecodable:
                log.warning("KV events of this engine are not understood: %s", error)
            self.undecodable += 1
            self._index.distrust()
            return
        if self._index.known or any(type(event).__name__ == "AllBlocksCleared" for event in batch.events):
            self._index.apply(batch.events)

    async def _catch_up(self) -> None:
        """Ask for everything not yet seen; leaves `_next` where the replay ended."""
        if self._replay_endpoint is not None:
            async with self._replaying:
                await self._ask(self._replay_endpoint, self._next or 0)

    async def _ask(self, endpoint: str, start: int) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        try:
            async with asyncio.timeout(REPLAY_SECONDS):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
                await self._replay(socket, start)
        except TimeoutError:
            log.warning("no replay of KV events within %s s: GPU residency is unknown", REPLAY_SECONDS)
        finally:
            socket.close()

    async def _replay(self, socket: zmq.asyncio.Socket, start: int) -> None:
        expected = start
        while True:
            frames = await socket.recv_multipart()
            sequence, payload = frames[-2], frames[-1]
            if sequence == _END:
                break
            number = int.from_bytes(sequence, "big")
            if number != expected:
                return  # the buffer does not reach back that far
            if number == 0:
                self._index.restart()
            if self._next is None or number >= self._next:
                self._apply(number, payload)
            expected = number + 1
        if start == 0 and expected == 0:
            self._index.restart()  # this engine has published nothing yet
            self._next = 0
