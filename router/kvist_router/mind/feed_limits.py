"""Whether the figures of a feed's message can be at all. Pure; mind/replica.py asks before it applies one.

Every request is priced on every replica, so a figure that is not finite, negative or too large to calculate
with would fail the requests of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvist_connector.protocol import feed
from kvist_connector.protocol.engine import EngineLoad, RequestRecord
from kvist_router.errors import FeedError

COUNT: Final = 2**53 - 1  # exact as a float, too
LAYOUT_TOKENS: Final = 2**20  # of a chunk or a block
GROUPS: Final = 2**32 - 1  # hashed as 4 bytes (keys.root_key)
SECONDS: Final = 1e9
BYTES_PER_SECOND: Final = 1e18
FINGERPRINT_BYTES: Final = 256

_Figure = tuple[str, float, float]  # name, value, most
_COUNTS: Final = (
    "waiting_requests",
    "running_requests",
    "waiting_prefill_tokens",
    "running_prefill_tokens",
    "decode_sequences",
    "kv_tokens_total",
    "kv_tokens_used",
)
_PREFILL: Final = ("prefill_seconds_per_token", "prefill_seconds_per_token2")
_DURATIONS: Final = ("lookup_seconds", "wait_seconds", "load_seconds", "prefill_seconds")


def check(message: feed.FeedMessage) -> None:
    """Raises FeedError that names the first figure which cannot be."""
    for name, value, most in _figures(message):
        if not 0 <= value <= most:  # false of NaN, too
            raise FeedError(f"{name} is {value!r:.40}, which is not in 0..{most:.15g}")


def _figures(message: feed.FeedMessage) -> Iterator[_Figure]:
    if isinstance(message, feed.Load):
        yield "chunk_bytes", message.chunk_bytes, COUNT
        yield from _of_load(message.load)
        for speed in message.speeds:
            yield f"latency of tier {speed.tier}", speed.latency_seconds, SECONDS
            yield f"speed of tier {speed.tier}", speed.bytes_per_second, BYTES_PER_SECOND
    elif isinstance(message, feed.Record):
        yield from _of_record(message.record)
    elif isinstance(message, feed.Opening) and message.version == feed.FEED_VERSION:
        yield "group", message.group, GROUPS
        yield "chunk_tokens", message.chunk_tokens, LAYOUT_TOKENS
        yield "block_tokens", message.block_tokens, LAYOUT_TOKENS
        yield "length of the fingerprint", len(message.fingerprint), FINGERPRINT_BYTES


def _of_load(load: EngineLoad) -> Iterator[_Figure]:
    for name in _COUNTS:
        yield name, getattr(load, name), COUNT
    for name in _PREFILL:
        yield name, getattr(load, name), SECONDS


def _of_record(record: RequestRecord) -> Iterator[_Figure]:
    yield "prompt_tokens", record.prompt_tokens, COUNT
    yield "arrived", record.arrived, COUNT
    for tier, tokens in record.hit_tokens.items():
        yield f"hit_tokens of tier {tier}", tokens, COUNT
    for name in _DURATIONS:
        yield name, getattr(record, name), SECONDS
