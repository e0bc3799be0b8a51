"""Keys of chunks: what makes two KV chunks the same one.

Called by the engine adapter (from the tokens the engine really has), the agent
(mapping the engine's KV events), the router (from the tokens it rendered) and
the tools. Torch-free. Golden vectors in tests/connector/test_keys.py pin every byte.

    root      = blake3(fingerprint, group, lora name, lora revision, cache salt)
    chunk i   = blake3(key of chunk i-1 | root, tokens of the chunk as little-endian u32, multimodal hashes)
    tail      = the same formula over the first n < chunk tokens of the chunk: the key of
                a prefix that ends inside a chunk; used for GPU residency only, never stored

All keys are 16 bytes. Fields are length-prefixed, so no two inputs share an encoding.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from sys import byteorder
from typing import Final

from blake3 import blake3

KEY_BYTES = 16
CHUNK_TOKENS = 256

_ROOT_DOMAIN = b"kvist root 1"
_CHUNK_DOMAIN = b"kvist chunk 1"
_JOINED: Final = struct.Struct(f"{KEY_BYTES}s")


def root_key(
    fingerprint: bytes, *, group: int = 0, lora: str = "", lora_revision: str = "", salt: str = ""
) -> bytes:
    """The start of every chain of one model, KV group, adapter and tenant."""
    digest = blake3(_ROOT_DOMAIN)
    for part in (fingerprint, struct.pack("<I", group), lora.encode(), lora_revision.encode(), salt.encode()):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.digest(KEY_BYTES)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian u32; raises OverflowError for ids outside 0..2**32-1."""
    packed = array("I", tokens)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def next_key(parent: bytes, packed_tokens: bytes, multimodal: Sequence[bytes] = ()) -> bytes:
    """Key of the prefix that extends `parent` by the packed tokens (one chunk or a tail)."""
    digest = blake3(_CHUNK_DOMAIN)
    digest.update(parent)
    digest.update(struct.pack("<I", len(packed_tokens)))
    digest.update(packed_tokens)
    for item in multimodal:
        digest.update(struct.pack("<I", len(item)))
        digest.update(item)
    return digest.digest(KEY_BYTES)


def chunk_keys(root: bytes, tokens: Sequence[int], chunk_tokens: int = CHUNK_TOKENS) -> list[bytes]:
    """Keys of all full chunks of a text-only prompt; a partial tail has none."""
    return extend_keys(root, [], tokens, chunk_tokens)


def extend_keys(
    root: bytes, known: list[bytes], tokens: Sequence[int], chunk_tokens: int = CHUNK_TOKENS
) -> list[bytes]:
    """`known` (keys of the first chunks of `tokens`) plus the keys of the chunks after them."""
    keys = list(known)
    parent = keys[-1] if keys else root
    start = len(keys) * chunk_tokens
    packed = pack_tokens(tokens[start : len(tokens) // chunk_tokens * chunk_tokens])
    step = 4 * chunk_tokens
    for offset in range(0, len(packed), step):
        parent = next_key(parent, packed[offset : offset + step])
        keys.append(parent)
    return keys


def tail_keys(
    parent: bytes, tokens: Sequence[int], block_tokens: int, chunk_tokens: int = CHUNK_TOKENS
) -> list[bytes]:
    """Keys of the prefixes of one chunk that end on an engine block, shortest first.

    `tokens` are those of the chunk after `parent`, possibly fewer than a chunk;
    with a whole chunk the last key is the chunk's own.
    """
    packed = pack_tokens(tokens[:chunk_tokens])
    blocks = len(packed) // (4 * block_tokens)
    return [next_key(parent, packed[: 4 * block_tokens * n]) for n in range(1, blocks + 1)]


def split_keys(joined: bytes) -> list[bytes]:
    """The inverse of b"".join(keys), the form keys travel in."""
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes of keys are not a multiple of {KEY_BYTES}")
    return [key for (key,) in _JOINED.iter_unpack(joined)]
