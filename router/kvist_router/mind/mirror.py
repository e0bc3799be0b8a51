"""A replica's cache index as its feed tells it, and the approximate one of a replica without feed.

Called by mind/replica.py. Pure state: applying a message never does I/O. `apply` raises FeedError
when the view can no longer be believed; the reader then connects anew and takes a new snapshot.

Keys are 16 bytes; of each the tiers are one bit mask. GPU keys are prefixes at engine-block
granularity, all others whole chunks (protocol/feed.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import filterfalse, repeat, takewhile

import msgspec

from kvist_connector.keys import split_keys
from kvist_connector.protocol import feed
from kvist_connector.protocol.tiers import PREFERENCE, SHARED_TIERS, Tier
from kvist_router.errors import FeedError
from kvist_router.mind.shared import PEER_BIT, SHARED_BITS, SharedKeys

GPU_BIT = 1 << Tier.GPU
# For bytes.translate: mask -> 1 when the GPU holds the key; mask -> best stored tier, 0 when there is none.
_ON_GPU = bytes(mask & GPU_BIT for mask in range(256))
_BEST = bytes(next((tier for tier in PREFERENCE[1:] if mask & (1 << tier)), 0) for mask in range(256))


class Hit(msgspec.Struct, frozen=True, gc=False):
    """What a replica holds of a prompt, from its start."""

    gpu_chunks: int
    stored: bytes  # one byte per leading stored chunk: its Tier

    @property
    def chunks(self) -> int:
        """Leading chunks held in one way or the other."""
        return max(self.gpu_chunks, len(self.stored))


NO_HIT = Hit(0, b"")


class Mirror:
    """One replica's index. `max_keys` bounds it; keys beyond are not taken and counted in `overflow`.

    `shared` is what all mirrors say of shared tiers and of their memory: of that, what this replica reads
    counts for it.
    """

    def __init__(self, max_keys: int, shared: SharedKeys | None = None) -> None:
        self._max_keys = max_keys
        self._tiers: dict[bytes, int] = {}
        self._shared = shared if shared is not None else SharedKeys()
        self._told: dict[int, set[bytes]] = {}  # by bit of a shared tier: what `shared` counts of ours
        self._reads = 0  # bits of the shared tiers that it has and that answer it
        self._whole, self._best = _without(0)
        self._sequence = 0
        self.opening: feed.Opening | None = None
        self.complete = False  # the snapshot has arrived in full
        self.gpu_known = False
        self.draining = False
        self.overflow = 0

    def __len__(self) -> int:
        return len(self._tiers)

    def open(self, message: feed.Opening) -> None:
        """Start a connection's view: everything before it is forgotten."""
        if message.version != feed.FEED_VERSION:
            raise FeedError(f"feed version {message.version}, this router reads {feed.FEED_VERSION}")
        # Before an engine has registered there is no layout, and no fingerprint either.
        if message.fingerprint and (message.chunk_tokens <= 0 or message.block_tokens < 0):
            raise FeedError(f"chunk of {message.chunk_tokens} tokens, block of {message.block_tokens}")
        self.forget()
        self._shared.lends(self)
        self._sequence = 0
        self.opening, self.complete, self.overflow = message, False, 0
        self.gpu_known, self.draining = message.gpu_known, message.draining

    def forget(self) -> None:
        """Empty it, and take back what it said of shared tiers; the replica goes, or starts anew."""
        for bit, keys in self._told.items():
            self._shared.taken_back(bit, keys)
        self._told.clear()
        self._tiers.clear()
        self._shared.lends_no_more(self)
        self.tiers_answer(())

    def tiers_answer(self, speeds: Iterable[feed.TierSpeed]) -> None:
        """Take over which lower tiers it has; one without speed does not answer it, and is none."""
        told = {
            1 << speed.tier: speed.bytes_per_second > 0 for speed in speeds if 0 <= speed.tier < len(Tier)
        }
        self._reads = sum(bit for bit, answers in told.items() if answers) & (SHARED_BITS | PEER_BIT)
        silent = sum(bit for bit, answers in told.items() if not answers)
        self._whole, self._best = _without(silent & SHARED_BITS)

    def follow(self, sequence: int) -> None:
        """Check that no frame is missing."""
        if self.opening is None or sequence != self._sequence + 1:
            raise FeedError(f"sequence {sequence} follows {self._sequence}")
        self._sequence = sequence

    def snapshot(self, message: feed.Snapshot) -> None:
        """Take a part of the snapshot."""
        if self.complete:
            raise FeedError("a snapshot part after the last one")
        self._add(_keys(message.keys), _bit(message.tier))
        self.complete = message.last

    def delta(self, message: feed.Delta) -> list[bytes]:
        """Apply changes of one tier; returns the added keys."""
        bit = _bit(message.tier)
        tiers, removed = self._tiers, _keys(message.removed)
        if bit & SHARED_BITS:
            self._take_back(bit, removed)
        for key in removed:
            left = tiers.get(key, 0) & ~bit
            if left:
                tiers[key] = left
            else:
                tiers.pop(key, None)
        added = _keys(message.added)
        self._add(added, bit)
        return added

    def state(self, message: feed.State) -> None:
        """Take over flags; an unknown GPU view is emptied, or it would pass for a current one."""
        self.gpu_known, self.draining = message.gpu_known, message.draining
        if not message.gpu_known:
            self._drop_tier(GPU_BIT)

    def hit(self, keys: Sequence[bytes]) -> Hit:
        """Leading chunks of a prompt that the replica holds."""
        tiers, reads = self._tiers, self._reads
        if not keys or not (keys[0] in tiers or (reads and self._elsewhere(keys))):
            return NO_HIT
        # Loops in C, and no further than need be: this runs for every replica of every request.
        if not reads:  # a key that is not there ends the hit: the half of them is enough, or a quarter ...
            end = len(keys)
            while end > 1 and keys[end // 2] not in tiers:
                end //= 2
            keys = keys[:end]
        masks = bytes(map(tiers.get, keys, repeat(0)))
        gpu = masks.translate(_ON_GPU).find(0)
        if reads:
            stored = _either(masks.translate(self._whole), self._shared.masks(keys, reads)).translate(_BEST)
        else:
            stored = masks.translate(self._best)
        end = stored.find(0)
        return Hit(gpu if gpu >= 0 else len(masks), stored[:end] if end >= 0 else stored)

    def gpu_has(self, key: bytes) -> bool:
        """Whether the key is on the GPU."""
        return bool(self._tiers.get(key, 0) & GPU_BIT)

    def on_gpu(self) -> bool:
        """Whether anything at all is on the GPU; stops at the first such key."""
        return any(mask & GPU_BIT for mask in self._tiers.values())

    def has(self, key: bytes) -> bool:
        """Whether any tier holds the key."""
        return key in self._tiers

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those that no tier holds."""
        tiers = self._tiers
        if not self._reads or not keys:
            return [key for key in keys if key not in tiers]
        masks = self._shared.masks(keys, self._reads)
        return [key for key, mask in zip(keys, masks, strict=True) if not mask and key not in tiers]

    def counts(self) -> dict[str, int]:
        """Keys by tier; walks the whole index, for the admin API only."""
        return {
            tier.label: sum(1 for mask in self._tiers.values() if mask & (1 << tier))
            for tier in Tier
            if tier is not Tier.GPU or self.gpu_known
        }

    @property
    def tiers(self) -> Mapping[bytes, int]:
        """See shared.Lender."""
        return self._tiers

    def _elsewhere(self, keys: Sequence[bytes]) -> bool:
        """Whether a shared tier or a peer may have the beginning."""
        reads = self._reads
        return self._shared.has(keys[0], reads) or bool(reads & PEER_BIT and self._shared.at_peers(keys))

    def _add(self, keys: list[bytes], bit: int) -> None:
        self._shared.changed()
        tiers = self._tiers
        room = self._max_keys - len(tiers)
        told: set[bytes] = set()
        for key in keys:
            mask = tiers.get(key)
            if mask is None:
                if room <= 0:
                    self.overflow += 1
                    continue
                room -= 1
                mask = 0
            if bit & SHARED_BITS:
                told.add(key)
            tiers[key] = mask | bit
        if told:
            mine = self._told.setdefault(bit, set())
            self._shared.told(bit, told - mine)
            mine |= told

    def _take_back(self, bit: int, keys: list[bytes]) -> None:
        mine = self._told.get(bit, set())
        gone = mine.intersection(keys)
        self._shared.taken_back(bit, gone)
        mine -= gone

    def _drop_tier(self, bit: int) -> None:
        self._shared.changed()
        self._tiers = {key: mask & ~bit for key, mask in self._tiers.items() if mask & ~bit}


class ApproximateIndex:
    """What a replica probably holds, from this router's own dispatches: an LRU of chunk keys."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Sequence[bytes]) -> None:
        """A prompt was computed there. Its first chunk becomes the most recent: prefixes outlive tails."""
        known = self._keys
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def hit(self, keys: Sequence[bytes]) -> Hit:
        """Leading chunks, taken to be on the GPU."""
        return Hit(len(list(takewhile(self._keys.__contains__, keys))), b"")

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those that are probably not there."""
        return list(filterfalse(self._keys.__contains__, keys))

    def clear(self) -> None:
        """The engine started anew."""
        self._keys.clear()


@lru_cache(1 << len(SHARED_TIERS))  # asked with every load report, and there are no more answers
def _without(bits: int) -> tuple[bytes, bytes]:
    """For bytes.translate: every mask without these tiers, and the best stored tier of that."""
    rest = bytes(mask & ~bits for mask in range(256))
    return rest, rest.translate(_BEST)


def _either(first: bytes, second: bytes) -> bytes:
    return (int.from_bytes(first) | int.from_bytes(second)).to_bytes(len(first))


def _bit(tier: int) -> int:
    if not 0 <= tier < len(Tier):
        raise FeedError(f"unknown tier {tier}")
    return 1 << tier


def _keys(joined: bytes) -> list[bytes]:
    try:
        return split_keys(joined)
    except ValueError as error:
        raise FeedError(str(error)) from error
