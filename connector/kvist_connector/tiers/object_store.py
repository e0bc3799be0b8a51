"""Chunks as objects in S3 and its like, Google Cloud Storage, Azure or a shared folder.

Called by `agent.stores`. One object a chunk, `<prefix of the URL>/<scope>/<key>` in hexadecimal,
so that one model's chunks are listed without the others'. A put is conditional, so a chunk is
stored once for the cluster (one request, no multipart upload: its completion cannot be conditional
here, and it was not faster); where the server has no conditional put, asking before and putting
must do (two agents may then both send the same bytes), which is said once. A replacement is conditional
on the object's ETag; a server that has no such thing is told in steps. Folders: `folder_store.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import obstore
from obstore import exceptions

from kvist_connector.errors import StorageFull, TierError
from kvist_connector.tiers.base import Buffer, Capabilities, Capacity, ChunkStore, Item, Read
from kvist_connector.tiers.pieces import Filler

if TYPE_CHECKING:
    from obstore import ObjectMeta, UpdateVersion
    from obstore.store import ObjectStore as Backend

log = logging.getLogger(__name__)

_KEY_BYTES: Final = 16
_UNSCOPED: Final = "none"  # where keys without a scope lie; an agent has none
_ASKED_AT_ONCE: Final = 32
_LIST_BATCH: Final = 1000
# How servers say that they know no conditional put: S3's error code and HTTP's status.
_NO_CONDITION: Final = ("NotImplemented", "501")
# S3's error code; the status is that of wrong credentials.
_SKEWED: Final = "RequestTimeTooSkewed"
# A refused list has no error class of its own.
_DENIED: Final = ("status code: 401", "status code: 403")

# A server over a full file system, and a full file system: what they have they serve still.
_NO_SPACE: Final = ("status code: 507", "(os error 28)")


class _Unconditional(Exception):  # noqa: N818 - a state, not a fault
    """The server has no conditional put."""


class ObjectStore(ChunkStore):
    """See module. `backend` has its own deadlines; `label` names it in messages."""

    def __init__(self, backend: Backend, label: str, threads: Executor) -> None:
        self._backend = backend
        self._label = label
        self._threads = threads
        self._conditional = True
        self._replaces = True

    @property
    def capabilities(self) -> Capabilities:
        """Every agent's."""
        return Capabilities(persistent=True, shared=True, listable=True)

    async def probe(self) -> None:
        """See ChunkStore. Asked by a list, since an answer to HEAD has no body: a bucket that is not there
        would be a missing object, and a clock that is wrong a wrong key."""
        with self._in_words():
            async for _ in obstore.list(self._backend, _UNSCOPED, chunk_size=1):
                return

    async def get(self, read: Read) -> int | None:
        """See ChunkStore; one ranged request, whose body the client has whole before it is copied."""
        filler, path = Filler(read.into), path_of(read.key)
        if not filler.room:
            return await self._size(path)
        with self._in_words():
            try:
                found = await obstore.get_async(self._backend, path, options={"range": (0, filler.room)})
            except FileNotFoundError:
                return None
            # As a stream it came at a fifth of the speed.
            body = memoryview(await found.bytes_async())
            await asyncio.get_running_loop().run_in_executor(self._threads, filler.put, body, read.seen)
            return int(found.meta["size"])

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """See ChunkStore; a few requests at a time."""
        turn = asyncio.Semaphore(_ASKED_AT_ONCE)

        async def ask(key: bytes) -> int | Exception | None:
            async with turn:
                try:
                    return await self._size(path_of(key))
                except TierError as error:
                    return error

        return list(await asyncio.gather(*(ask(key) for key in keys)))

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore."""
        path = path_of(key)
        # Asking first saves sending what another agent has stored.
        if await self._size(path) is not None:
            return False
        body = await self._joined(parts)
        if self._conditional:
            try:
                return await self._create(path, body)
            except _Unconditional:
                self._conditional = False
                log.warning(
                    "%s has no conditional put: chunks that two agents store at once are sent twice",
                    self._label,
                )
        with self._in_words(StorageFull):
            await obstore.put_async(self._backend, path, body, use_multipart=False)
        return True

    async def replace(self, key: bytes, seen: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore."""
        if not self._replaces:
            return await super().replace(key, seen, parts)
        path = path_of(key)
        with self._in_words(StorageFull):
            try:
                found = await obstore.get_async(self._backend, path, options={"range": (0, len(seen))})
                if bytes(await found.bytes_async()) != seen:
                    return False
                body = await self._joined(parts)
                mode = _version(found.meta)
                await obstore.put_async(self._backend, path, body, mode=mode, use_multipart=False)
                return True
            except (FileNotFoundError, exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return False
            except (NotImplementedError, exceptions.BaseError) as error:
                if not _lacks_condition(error):
                    raise
        self._replaces = False
        log.warning(
            "%s has no conditional replacement: tags that agents add at once may be lost", self._label
        )
        return await super().replace(key, seen, parts)

    async def delete(self, key: bytes) -> bool:
        """See ChunkStore. Object stores do not say whether there was one: asked before."""
        path = path_of(key)
        if await self._size(path) is None:
            return False
        with self._in_words():
            try:
                await obstore.delete_async(self._backend, path)
            except FileNotFoundError:
                return False
        return True

    async def items(self, prefix: bytes = b"") -> AsyncIterator[Item]:
        """See ChunkStore; `prefix` is a whole scope or nothing."""
        folder = prefix.hex() if prefix else None
        with self._in_words():
            async for batch in obstore.list(self._backend, folder, chunk_size=_LIST_BATCH):
                for found in batch:
                    key = _key(found["path"])
                    if key is not None:
                        yield Item(key, int(found["size"]))

    async def capacity(self) -> Capacity:
        """Lists everything; an object store has no limit of its own."""
        used = 0
        async for item in self.items():
            used += item.size
        return Capacity(used, None)

    async def close(self) -> None:
        """Nothing is held."""

    async def _joined(self, parts: Sequence[Buffer]) -> bytes:
        """One object takes one buffer; joining this much releases the GIL."""
        views = [memoryview(part) for part in parts]
        return await asyncio.get_running_loop().run_in_executor(self._threads, b"".join, views)

    async def _create(self, path: str, body: bytes) -> bool:
        with self._in_words(StorageFull):
            try:
                await obstore.put_async(self._backend, path, body, mode="create", use_multipart=False)
                return True
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return False
            except (NotImplementedError, exceptions.BaseError) as error:
                if _lacks_condition(error):
                    raise _Unconditional from error
                # A server that refuses early closes the connection amid the body, and its answer is lost.
                if await self._size(path) is None:
                    raise
                return False

    async def _size(self, path: str) -> int | None:
        with self._in_words():
            try:
                return int((await obstore.head_async(self._backend, path))["size"])
            except FileNotFoundError:
                return None

    @contextmanager
    def _in_words(self, full: type[TierError | StorageFull] = TierError) -> Iterator[None]:
        try:
            yield
        except (exceptions.BaseError, OSError, ValueError, NotImplementedError) as error:
            raise (full if any(sign in str(error) for sign in _NO_SPACE) else TierError)(
                f"{self._label}: {explain(error)}"
            ) from error


def explain(error: Exception) -> str:
    """One line of an obstore error, with the remedy where there is one."""
    text = str(error).partition("\n\nDebug source")[0].replace("\n", " ")[:500]
    if _SKEWED in str(error):
        return f"this machine's clock and the server's differ too much: set the time of both ({text})"
    if isinstance(error, exceptions.UnauthenticatedError | exceptions.PermissionDeniedError) or any(
        sign in text for sign in _DENIED
    ):
        return f"access denied: check object_store.credentials_file and the bucket's policy ({text})"
    return text or type(error).__name__


def _lacks_condition(error: Exception) -> bool:
    return isinstance(error, NotImplementedError | exceptions.NotSupportedError) or any(
        sign in str(error) for sign in _NO_CONDITION
    )


def _version(meta: ObjectMeta) -> UpdateVersion:
    """Which object is to be replaced."""
    version: UpdateVersion = {}
    if meta["e_tag"] is not None:
        version["e_tag"] = meta["e_tag"]
    if meta["version"] is not None:
        version["version"] = meta["version"]
    return version


def path_of(key: bytes) -> str:
    """Where a chunk lies, below the URL's prefix."""
    return f"{key[:-_KEY_BYTES].hex() or _UNSCOPED}/{key[-_KEY_BYTES:].hex()}"


def _key(path: str) -> bytes | None:
    scope, _, own = path.rpartition("/")
    scope = scope.rpartition("/")[2]
    try:
        key = bytes.fromhex("" if scope == _UNSCOPED else scope) + bytes.fromhex(own)
    except ValueError:
        return None
    return key if len(own) == 2 * _KEY_BYTES else None
