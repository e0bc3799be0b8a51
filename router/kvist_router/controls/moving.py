"""`move` from replicas to another one: its agent reads from theirs, then theirs let go.

    each source: offer -> target: take, batch after batch -> take (dry run): what is there -> source: release

Addresses are those of known replicas, ports what their agents said. At the deadline, or when one of the
two fails, what was not seen at the target stays where it is. Called by routes.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvist_connector import names
from kvist_connector.protocol.peer import MOST_TAKEN, Offer, Offered, Released, Taken
from kvist_router.controls.fanout import NO_AGENT, Answer, FanOut
from kvist_router.mind.replica import Replica

# So that one answer comes long before its deadline, also over a slow network.
_BATCH: Final = 64
_OWN_FIELDS: Final = ("to", "copy", "dry_run")
T = TypeVar("T")


class _MoveError(Exception):
    """What one of the two agents said instead."""


class Mover:
    """`seconds`: of a whole move."""

    def __init__(self, fanout: FanOut, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fanout = fanout
        self._seconds = seconds
        self._clock = clock

    async def move(self, sources: list[Replica], target: Replica, sent: dict[str, Any]) -> dict[str, Answer]:
        """Each source's answer, one after the other: what two of them have is read once."""
        end = self._clock() + self._seconds
        answers: dict[str, Answer] = {}
        for source in sources:
            errand = _Errand(self._fanout, source, target, sent, lambda: self._clock() < end)
            try:
                answers[source.name] = await errand.run()
            except _MoveError as error:
                answers[source.name] = {"error": str(error)}
        return answers


class _Errand:
    """From one source to the target."""

    def __init__(
        self,
        fanout: FanOut,
        source: Replica,
        target: Replica,
        sent: dict[str, Any],
        in_time: Callable[[], bool],
    ) -> None:
        self._fanout = fanout
        self._source = source
        self._target = target
        self._selection = {field: value for field, value in sent.items() if field not in _OWN_FIELDS}
        self._copy = bool(sent.get("copy"))
        self._dry_run = bool(sent.get("dry_run"))
        self._in_time = in_time

    async def run(self) -> Answer:
        """The source's answer; raises _MoveError."""
        offer = await self._ask(self._source, names.PATH_OFFER, self._selection, Offer)
        if self._dry_run:
            lacking = len(offer.chunks) - len(await self._there(offer))
            return self._answer(offer, lacking if self._copy else len(offer.chunks))
        taken = complete = 0
        for batch in _batches(offer.chunks, _BATCH):
            if not self._in_time():
                break
            taken += (await self._take(offer, batch, dry_run=False)).chunks
            complete += len(batch)
        there = await self._there(offer)
        missing = len(offer.chunks) - len(there)
        late = {} if complete == len(offer.chunks) else {"complete": False}
        if self._copy:
            return self._answer(offer, taken, missing=missing) | late
        went = await self._ask(self._source, names.PATH_RELEASE, {"keys": there}, Released)
        return late | self._answer(
            offer, max(taken, went.chunks), missing=missing, leased=went.leased, pinned=went.pinned
        )

    async def _there(self, offer: Offer) -> list[str]:
        found: list[str] = []
        for batch in _batches(offer.chunks, MOST_TAKEN):
            found += (await self._take(offer, batch, dry_run=True)).there
        return found

    async def _take(self, offer: Offer, batch: list[Offered], dry_run: bool) -> Taken:
        body = {
            "source": peer_of(self._source, offer.port),
            "fingerprint": offer.fingerprint,
            "chunks": msgspec.to_builtins(batch),
            "dry_run": dry_run,
        }
        return await self._ask(self._target, names.PATH_TAKE, body, Taken)

    async def _ask(self, replica: Replica, path: str, body: dict[str, Any], kind: type[T]) -> T:
        answer = await self._fanout.ask_one(replica, path, body)
        if "error" in answer:
            raise _MoveError(f"{replica.name}: {answer['error']}")
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise _MoveError(f"{replica.name} answers something else: {error}") from error

    def _answer(self, offer: Offer, chunks: int, **more: int) -> Answer:
        return {
            "chunks": chunks,
            "tokens": chunks * offer.chunk_tokens,
            "bytes": chunks * offer.chunk_bytes,
            **more,
            "dry_run": self._dry_run,
        }


def peer_of(source: Replica, port: int) -> str:
    """Where the source's peer port is: on the host of its agent. Raises _MoveError."""
    host = urlsplit(source.agent or "").hostname
    if host is None or not 0 < port < 65536:
        raise _MoveError(f"{source.name}: {NO_AGENT}")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _batches(chunks: list[Offered], size: int) -> Iterator[list[Offered]]:
    for start in range(0, len(chunks), size):
        yield chunks[start : start + size]
