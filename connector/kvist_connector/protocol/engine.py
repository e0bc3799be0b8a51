"""Messages between an engine and its agent, over a Unix stream socket.

Two kinds of connection: one from the scheduler half, one from each worker.

    worker                         agent                       scheduler half
      | Hello, Register  ------->    |                              |
      | <--- Welcome, Arena          |   <------------------- Hello |
      |                              |   Welcome, Arena, Grant ---> |
      |                              |   <--- Lookup (new request)  |
      |                              |   Answer (pushed, 1..n) ---> |
      |   (metadata by the engine: loads and stores, SlotRefs)      |
      |                              |   <--- Step (one per step)   |
      | <--- Quiesce, Quiesced --->  |   Evicted, Grant ----------> |

Everything that belongs to a connection (grants, leases) ends with it.
A message that the receiver cannot decode closes the connection.
Keys travel joined (`keys.split_keys`). Times are seconds, sizes bytes.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

PROTOCOL_VERSION = 1
# Types of values that can be told apart from their bytes.
VALUE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Base: positional on the wire, tagged by class name, immutable."""


class SlotRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One slot at one generation; valid only while the slot's header says the same.

    An agent has as many as chunks in memory, and an answer one for each: the garbage collector need not
    look at them, since they hold numbers only.
    """

    slot: int
    generation: int


class Geometry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where a chunk lies in the arena file. Offsets are derived in arena/geometry.py.

    A chunk of one rank is `layers` pieces of `layer_bytes`, in the order the
    worker registered its layers; a piece is `blocks` engine pages of
    `layer_bytes // blocks` raw bytes each.
    """

    slots: int
    ranks: int
    layers: int
    layer_bytes: int
    blocks: int
    chunk_tokens: int


class Values(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of a chunk mean, as far as lossy compression needs it.

    `run` values in a row lie within the K or the V of one head at one token; 0 when that cannot be told,
    `problem` says why then.
    """

    dtype: str = ""
    run: int = 0
    problem: str = ""

    @property
    def known(self) -> bool:
        """Whether every value can be told from its neighbours."""
        return self.dtype in VALUE_BYTES and self.run > 0


NO_VALUES: Final = Values()


class Layout(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a worker read from its real tensors; equal on all ranks, or the agent refuses."""

    fingerprint: bytes
    group: int
    ranks: int
    layers: int
    layer_bytes: int
    blocks: int
    chunk_tokens: int
    block_tokens: int
    model: str
    description: dict[str, str]  # human-readable parts of the fingerprint, for `kvist status` and refusals
    values: Values = NO_VALUES


# ---- engine -> agent


class Hello(Message, frozen=True):
    """First message of a connection."""

    protocol: int
    role: Literal["scheduler", "worker"]
    engine: str  # one id per engine process start, equal in scheduler half and workers where known, else ""
    member: str  # id of this connection's owner; a worker holds the lock file of this name (arena/locks.py)
    rank: int
    pid: int


class Register(Message, frozen=True):
    """A worker's layout. The first one gives the arena its geometry."""

    layout: Layout


class Quiesced(Message, frozen=True):
    """Worker: no copy begun before the Quiesce of this ticket is still running."""

    ticket: int


class Lookup(Message, frozen=True):
    """Scheduler half: a request arrived. Resident chunks are leased to it before the first Answer."""

    request: str  # the engine's request id
    keys: bytes  # of all full chunks of the prompt, in order
    tokens: int  # length of the prompt
    local_tokens: int = 0  # known GPU hit, 0 when unknown; a hint for the planner
    tags: tuple[str, ...] = ()


class Commit(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A slot that every rank has filled with KV of accepted tokens."""

    ref: SlotRef
    key: bytes
    parent: bytes  # key of the chunk before it; the root for the first chunk
    index: int  # position in the chain, 0 for the first chunk
    tags: tuple[str, ...] = ()
    epoch: int = 0  # of retirement, as the scheduler half knew it when the request arrived


class EngineLoad(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How busy the engine is and how fast it prefills. Rates are 0.0 until measured."""

    waiting_requests: int = 0
    running_requests: int = 0
    waiting_prefill_tokens: int = 0
    running_prefill_tokens: int = 0
    decode_sequences: int = 0
    kv_tokens_total: int = 0  # capacity of the GPU's KV space in tokens
    kv_tokens_used: int = 0
    prefill_seconds_per_token: float = 0.0  # linear term of planner.PrefillModel
    prefill_seconds_per_token2: float = 0.0  # quadratic term
    last_accepted: dict[str, str] = {}  # router id -> last router request id taken from it
    decoded_reuse: float = 1.0  # share of answers that the next prompt of their conversation repeats


class RequestRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What really happened to one request, sent when its prefill ended.

    hit_tokens: tokens not computed, by tier number; GPU counts the engine's own prefix hit,
    the others loaded tokens by the tier the chunk came from when the request asked.
    """

    request: str  # id as the router sent it, prefix and suffix of the engine removed
    prompt_tokens: int
    last_chunk_key: bytes  # key of the prompt's last full chunk, b"" when it has none
    hit_tokens: dict[int, int]
    arrived: float  # Unix time the scheduler half saw the request
    lookup_seconds: float  # arrival -> first Answer
    wait_seconds: float  # arrival -> first scheduled
    load_seconds: float  # copying, as the worker measured it
    prefill_seconds: float  # first scheduled -> prompt computed
    failed_load: bool = False


class AnswerRecord(msgspec.Struct, frozen=True, array_like=True):
    """How long an answer became, sent when its request ended; chunks alone say so to a whole chunk only."""

    last_chunk_key: bytes  # key of the prompt's last full chunk; a prompt without one has no such record
    tokens: int  # decoded


class Step(Message, frozen=True):
    """The scheduler half's one message of a step; only sent when something is in it."""

    commits: tuple[Commit, ...] = ()
    discards: tuple[SlotRef, ...] = ()  # granted slots handed back unfilled or filled with nothing of worth
    releases: tuple[str, ...] = ()  # requests whose leases end
    bad_keys: bytes = b""  # chunks whose load failed: the agent drops them from the arena
    records: tuple[RequestRecord, ...] = ()
    load: EngineLoad | None = None
    answers: tuple[AnswerRecord, ...] = ()


class Reset(Message, frozen=True):
    """Scheduler half: the engine's cache was reset with its connector; forget all chunks of this model."""


# ---- agent -> engine


class Welcome(Message, frozen=True):
    """The agent accepts the connection."""

    protocol: int
    epoch: int  # grows with every start of the agent
    agent: str  # version, for logs
    disabled: str = ""  # why nothing is stored (memory: 0), empty when caching is on


class Refused(Message, frozen=True):
    """The agent does not accept; the connection closes. The text says why and what to do."""

    reason: str


class Arena(Message, frozen=True):
    """The arena is ready to map; sent after Welcome once geometry is known, and again if it changes.

    With zero slots and an empty path (memory: 0) there is nothing to map: it tells the fingerprint only.
    Grants, refs and leases of an earlier Arena of this connection are void.
    """

    path: str
    geometry: Geometry
    epoch: int
    fingerprint: bytes


class Grant(Message, frozen=True):
    """Slots the scheduler half may fill, empty and reserved for this connection."""

    refs: tuple[SlotRef, ...]


class Answer(Message, frozen=True):
    """State of a looked-up request: leading chunks that are in the arena and leased to it.

    `pending` true: lower tiers are being read, another Answer follows (at the latest at the
    agent's deadline). The last Answer of a request has pending false. A later Answer replaces
    the one before; refs only ever grow.
    """

    request: str
    refs: tuple[SlotRef, ...]
    tiers: bytes  # one byte per ref: the Tier the chunk was in when the request asked
    known: int  # leading chunks held in any tier: no need to store them again
    pending: bool


class Evicted(Message, frozen=True):
    """Chunks that left the last tier of this agent: storing them again is useful."""

    keys: bytes


class Retired(Message, frozen=True):
    """Cached state was retired at this epoch: the engine's own prefix cache must forget what it holds."""

    epoch: int


class Quiesce(Message, frozen=True):
    """To a worker: answer Quiesced(ticket) when copies begun before this message are over."""

    ticket: int


ToAgent = Hello | Register | Quiesced | Lookup | Step | Reset
ToEngine = Welcome | Refused | Arena | Grant | Answer | Evicted | Retired | Quiesce
