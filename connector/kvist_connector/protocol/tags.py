"""Tags of chunks: how many a chunk can carry, and the union of what two say. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Beyond this a chunk has the one tag EVERY_TAG: what is said of any tag is said of it.
MAX_TAGS: Final = 32
MAX_TAG_BYTES: Final = 2048
EVERY_TAG: Final = "*"
# A router's own, taken from no client: whose chunks they are, and the tokens that the tenant may hold
# on one agent (agent/quota.py), which is not kept with them.
TENANT: Final = "tenant:"
QUOTA: Final = "quota:"
RESERVED: Final = (TENANT, QUOTA)


def tag_bytes(tags: Iterable[str]) -> int:
    """What tags take of a stored chunk's header, at most."""
    return sum(len(tag.encode()) + 5 for tag in tags)


def merge_tags(one: Iterable[str], other: Iterable[str]) -> tuple[str, ...]:
    """The union, sorted; EVERY_TAG alone when that is more than a chunk can carry."""
    tags = tuple(sorted({*one, *other}))
    fits = len(tags) <= MAX_TAGS and tag_bytes(tags) <= MAX_TAG_BYTES
    return tags if fits and EVERY_TAG not in tags else (EVERY_TAG,)
