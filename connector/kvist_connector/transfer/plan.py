"""What one step copies. Torch-free; built by the scheduler half, carried out by the workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole pages between one slot and the engine.

    `pages[i]` is the engine's page for block `first_block + i` of the chunk.
    For a load, `key` is the key the slot must hold; for a store, `ticket` is what the
    scheduler half knows it by.
    """

    slot: int
    generation: int
    first_block: int
    pages: tuple[int, ...]
    key: bytes = b""
    ticket: int = 0
