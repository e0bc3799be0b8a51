"""Which prefixes the engine holds on its GPU, from its KV events. Pure: events in, key changes out.

The engine names blocks by hashes of its own; each block's tokens are in the event that stored
it, so its key follows by walking back to the start of its chunk. A block whose parent is
unknown, or whose hash covers more than tokens, adapter and salt, has no key and is left out:
an index that says too little only costs a hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvist_connector.keys import next_key, pack_tokens, root_key
from kvist_connector.protocol.engine import Layout

MAX_BLOCKS = 4_000_000
Hash = int | bytes


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """vLLM's event of the same name, as far as it is used."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """vLLM's event of the same name."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """vLLM's event of the same name."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One message of the engine's publisher."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class _Block(msgspec.Struct):
    """A stored block: `chunk` is the key before its chunk, `tail` the blocks of the chunk before it."""

    key: bytes
    chunk: bytes
    tail: tuple[bytes, ...]
    count: int = 1


class GpuIndex:
    """Keys of prefixes on the GPU. `on_change(key, added)`; `on_known(known)` when trust is won or lost."""

    def __init__(self, on_change: Callable[[bytes, bool], None], on_known: Callable[[bool], None]) -> None:
        self._on_change = on_change
        self._on_known = on_known
        self._layout: Layout | None = None
        self._blocks: dict[Hash, _Block] = {}
        self._keys: dict[bytes, int] = {}
        self.known = False
        self.skipped = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def keys(self) -> list[bytes]:
        """All keys, for a snapshot."""
        return list(self._keys)

    def serve(self, layout: Layout) -> None:
        """Keys belong to this layout from now on."""
        if self._layout is not None and self._layout.fingerprint != layout.fingerprint:
            self._clear()
        self._layout = layout

    def distrust(self) -> None:
        """Events were lost: nothing is known until the engine's cache is empty again."""
        self._clear(tell=False)
        if self.known:
            self.known = False
            self._on_known(False)

    def restart(self) -> None:
        """The engine's cache is known to be empty."""
        self._clear()
        if not self.known:
            self.known = True
            self._on_known(True)

    def apply(self, events: Sequence[Event]) -> None:
        """One batch of events, in order."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.restart()
            elif event.medium not in (None, "GPU") or event.group_idx not in (None, 0):
                continue
            elif isinstance(event, BlockRemoved):
                self._remove(event.block_hashes)
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        layout = self._layout
        if layout is None or event.block_size != layout.block_tokens:
            self.skipped += len(event.block_hashes)
            return
        parent = self._parent(event, layout)
        if parent is None or len(self._blocks) + len(event.block_hashes) > MAX_BLOCKS:
            self.skipped += len(event.block_hashes)
            return
        chunk, tail = parent
        per_chunk = layout.chunk_tokens // layout.block_tokens
        for block_hash, tokens in zip(event.block_hashes, _blocks(event), strict=False):
            tail = (*tail, tokens)
            key = next_key(chunk, b"".join(tail))
            self._add(block_hash, _Block(key, chunk, tail))
            if len(tail) == per_chunk:
                chunk, tail = key, ()

    def _parent(self, event: BlockStored, layout: Layout) -> tuple[bytes, tuple[bytes, ...]] | None:
        """Key before the first block's chunk, and the chunk's blocks before it."""
        extras = event.extra_keys or []
        if any(not _plain(extra) for extra in extras):
            return None
        if event.parent_block_hash is None:
            words = [str(word) for word in (extras[0] if extras else None) or ()]
            if event.lora_name and words and words[0] == event.lora_name:
                del words[0]
            salt = words[0] if words else ""
            return root_key(layout.fingerprint, group=layout.group, lora=event.lora_name or "", salt=salt), ()
        block = self._blocks.get(event.parent_block_hash)
        if block is None:
            return None
        full = len(block.tail) == layout.chunk_tokens // layout.block_tokens
        return (block.key, ()) if full else (block.chunk, block.tail)

    def _add(self, block_hash: Hash, block: _Block) -> None:
        present = self._blocks.get(block_hash)
        if present is not None:
            # Two requests computed equal blocks at once: each copy is stored and removed on its own.
            present.count += 1
            return
        self._blocks[block_hash] = block
        count = self._keys.get(block.key, 0)
        self._keys[block.key] = count + 1
        if not count:
            self._on_change(block.key, True)

    def _remove(self, hashes: Sequence[Hash]) -> None:
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                continue
            block.count -= 1
            if block.count:
                continue
            del self._blocks[block_hash]
            self._keys[block.key] -= 1
            if not self._keys[block.key]:
                del self._keys[block.key]
                self._on_change(block.key, False)

    def _clear(self, tell: bool = True) -> None:
        keys = list(self._keys)
        self._blocks.clear()
        self._keys.clear()
        if tell:
            for key in keys:
                self._on_change(key, False)


def _blocks(event: BlockStored) -> Iterator[bytes]:
    packed = pack_tokens(event.token_ids)
    step = 4 * event.block_size
    for start in range(0, len(packed) - step + 1, step):
        yield packed[start : start + step]


def _plain(extra: list[object] | None) -> bool:
    """Only adapter name and salt: multimodal items are lists, prompt embeddings bytes."""
    return all(isinstance(word, str) for word in extra or ())
