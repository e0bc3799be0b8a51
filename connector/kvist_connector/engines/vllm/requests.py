"""What the scheduler half knows of one request, and the pure arithmetic on it. Torch-free.

Invariant: `keys` are derived from tokens the engine really has (`request.all_token_ids`),
never from placeholders or speculative tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvist_connector import keys as key_chain
from kvist_connector.protocol.engine import SlotRef
from kvist_connector.transfer.plan import Piece

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MAX_TAGS = 32
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_CHILD_PREFIX = re.compile(r"^\d+_")
_PROMPT_INDEX = re.compile(r"-\d+$")


@dataclass
class RequestState:
    """Mutable state of one request; lives until its last step has been reported."""

    request: Request
    cacheable: bool
    tags: tuple[str, ...]
    arrived: float  # monotonic, like all times here but `arrived_unix`
    arrived_unix: float
    epoch: int = 0  # of retirement when it arrived
    root: bytes = b""
    keys: list[bytes] = field(default_factory=list)

    # the lookup
    asked_at: float | None = None
    answered_at: float | None = None
    refs: tuple[SlotRef, ...] = ()
    tiers: bytes = b""
    pending: bool = False
    waited: bool = False
    leased: bool = False
    preemptions: int = 0
    bad_keys: set[bytes] = field(default_factory=set)
    local_tokens: int = 0  # the engine's own hit when it last asked

    # the store
    stored_chunks: int = 0  # leading chunks known to the agent
    store_closed: bool = False
    answer_noted: bool = False  # its first chunk with generated tokens, for DecodedReuse

    # the record
    scheduled_at: float | None = None
    hit_tokens: dict[int, int] = field(default_factory=dict)
    lookup_seconds: float = 0.0
    load_seconds: float = 0.0
    failed_load: bool = False
    recorded: bool = False

    steps_in_flight: int = 0
    loads_in_flight: int = 0
    finished: bool = False

    @property
    def id(self) -> str:
        """The engine's id."""
        return str(self.request.request_id)

    def forget_agent(self) -> None:
        """The connection is gone, and with it leases and answers."""
        self.asked_at = self.answered_at = None
        self.refs, self.tiers = (), b""
        self.pending = self.leased = self.waited = False
        self.stored_chunks, self.store_closed = 0, False

    def hit_chunks(self) -> int:
        """Leading chunks that may be offered."""
        for index in range(len(self.refs)):
            if self.keys[index] in self.bad_keys:
                return index
        return len(self.refs)

    def extend_keys(self, chunks: int, chunk_tokens: int) -> list[bytes]:
        """Keys of at least the first `chunks` chunks; the tokens must be known."""
        if len(self.keys) < chunks:
            tokens = self.request.all_token_ids[: chunks * chunk_tokens]
            if self.request.mm_features:
                self.keys = _multimodal_keys(self.root, self.keys, tokens, chunk_tokens, self.request)
            else:
                self.keys = key_chain.extend_keys(self.root, self.keys, tokens, chunk_tokens)
        return self.keys


def is_cacheable(request: Request) -> bool:
    """Whether the tokens alone (with adapter, salt and media hashes) determine the KV."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and request.prompt_is_token_ids is None
        and request.pooling_params is None
        and not request.resumable
    )


def tags_of(request: Request) -> tuple[str, ...]:
    """`kv_transfer_params.tags`; anything that is not a short list of strings is ignored."""
    tags = (request.kv_transfer_params or {}).get("tags", ())
    if not isinstance(tags, list | tuple):
        return ()
    return tuple(tag for tag in tags[:_MAX_TAGS] if isinstance(tag, str))


def router_request_id(engine_id: str) -> str:
    """The id as the router sent it: prefix, child and prompt index, random suffix removed."""
    bare = _CHILD_PREFIX.sub("", _RANDOM_SUFFIX.sub("", engine_id))
    if bare.startswith("cmpl-"):
        return _PROMPT_INDEX.sub("", bare.removeprefix("cmpl-"))
    return bare.removeprefix("chatcmpl-")


def loadable_tokens(hit_tokens: int, num_tokens: int, local_tokens: int, block_tokens: int) -> int:
    """Tokens to load after the engine's own hit: whole blocks, one token left to compute."""
    usable = min(hit_tokens, num_tokens - 1) - local_tokens
    return max(0, usable // block_tokens * block_tokens)


def load_pieces(
    state: RequestState, table: Sequence[int], start: int, count: int, block_tokens: int, chunk_tokens: int
) -> list[Piece]:
    """Pieces that load tokens start..start+count; both are multiples of a block."""
    per_chunk = chunk_tokens // block_tokens
    first, end = start // block_tokens, (start + count) // block_tokens
    pieces = []
    for chunk in range(first // per_chunk, (end + per_chunk - 1) // per_chunk):
        low, high = max(first, chunk * per_chunk), min(end, (chunk + 1) * per_chunk)
        ref = state.refs[chunk]
        pages = tuple(table[low:high])
        pieces.append(Piece(ref.slot, ref.generation, low - chunk * per_chunk, pages, key=state.keys[chunk]))
    return pieces


def hits_by_tier(state: RequestState, start: int, count: int, chunk_tokens: int) -> dict[int, int]:
    """Loaded tokens by the tier their chunk was in when the request asked."""
    hits: dict[int, int] = {}
    position, end = start, start + count
    while position < end:
        chunk = position // chunk_tokens
        stop = min(end, (chunk + 1) * chunk_tokens)
        tier = state.tiers[chunk]
        hits[tier] = hits.get(tier, 0) + stop - position
        position = stop
    return hits


def _multimodal_keys(
    root: bytes, known: list[bytes], tokens: Sequence[int], chunk_tokens: int, request: Request
) -> list[bytes]:
    """As keys.extend_keys, with the hashes of media that overlap a chunk and where they begin in it."""
    keys = list(known)
    parent = keys[-1] if keys else root
    for start in range(len(keys) * chunk_tokens, len(tokens) - chunk_tokens + 1, chunk_tokens):
        packed = key_chain.pack_tokens(tokens[start : start + chunk_tokens])
        parent = key_chain.next_key(parent, packed, _media_in(request, start, start + chunk_tokens))
        keys.append(parent)
    return keys


def _media_in(request: Request, start: int, end: int) -> list[bytes]:
    hashes = []
    for feature in request.mm_features:
        place = feature.mm_position
        if place.offset < end and place.offset + place.length > start:
            hashes.append(
                feature.identifier.encode() + (place.offset - start).to_bytes(8, "little", signed=True)
            )
    return hashes
