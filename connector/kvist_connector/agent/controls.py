"""What the HTTP API can ask of an agent, without HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvist_connector.agent.core import Core
from kvist_connector.agent.drain import MAX_DEADLINE, AcknowledgeBody, Drain, DrainBody, Left
from kvist_connector.agent.gpu_index import GpuIndex
from kvist_connector.agent.handover import Handover
from kvist_connector.agent.lower import LowerTier
from kvist_connector.agent.pins import Pins
from kvist_connector.agent.retire import Retire
from kvist_connector.agent.selection import RequestError, Selector, select, typed
from kvist_connector.agent.totals import Totals
from kvist_connector.agent.writebehind import WriteBehind
from kvist_connector.protocol.tiers import Tier


class LookupBody(Selector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of lookup."""


class FlushBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of flush; deadline in seconds."""

    deadline: float = 30.0


class Controls:
    """One agent's controls."""

    def __init__(
        self,
        core: Core,
        lower: Mapping[Tier, LowerTier],
        writebehind: WriteBehind,
        gpu: GpuIndex,
        totals: Totals,
        drain: Drain,
        pins: Pins,
        retire: Retire,
        handover: Handover,
    ) -> None:
        self.retire = retire
        self.edits = handover.edits
        self.handover = handover
        self._drain = drain
        self._pins = pins
        self._core = core
        self._lower = lower
        self._writebehind = writebehind
        self._gpu = gpu
        self._totals = totals

    async def lookup(self, body: dict[str, Any]) -> dict[str, Any]:
        """Where each chunk of a prompt is, shared tiers asked; leases and recency stay as they are."""
        asked = typed(body, LookupBody)
        keys = select(asked, self._core.catalog, self._core.memory.layout)
        await self._core.loader.find(keys)
        chunks = []
        hit = 0
        for position, key in enumerate(keys):
            tiers = ([Tier.GPU] if key in self._gpu else []) + self._core.catalog.tiers_of(key)
            hit += bool(tiers) and hit == position
            chunk = self._core.catalog.get(key)
            tags = {"tags": chunk.tags} if chunk is not None and chunk.tags else {}
            pinned = {"pinned": True} if self._pins.holds(key) else {}
            rounded = [tier.label for tier in tiers if chunk is not None and tier in chunk.lossy]
            lossy = {"lossy": rounded} if rounded else {}
            chunks.append({"key": key.hex(), "tiers": [tier.label for tier in tiers]} | tags | pinned | lossy)
        layout = self._core.memory.layout
        tokens = hit * (layout.chunk_tokens if layout is not None else 0)
        return {
            "chunks": chunks,
            "hit_chunks": hit,
            "hit_tokens": tokens,
            "hit_bytes": hit * self._core.memory.chunk_bytes,
        }

    async def flush(self, body: dict[str, Any]) -> dict[str, int]:
        """Wait for write-behind."""
        deadline = typed(body, FlushBody).deadline
        if not 0 <= deadline <= 3600:
            raise RequestError(f"{deadline} is not within 0 to 3600 seconds", "deadline")
        await self._writebehind.flush(deadline)
        return {
            "pending_chunks": self._writebehind.pending_chunks,
            "pending_bytes": self._writebehind.pending_bytes,
        }

    async def drain(self, body: dict[str, Any]) -> Left:
        """Begin a drain and wait for it, or take it back."""
        asked = typed(body, DrainBody)
        if not 0 <= asked.deadline <= MAX_DEADLINE:
            raise RequestError(f"{asked.deadline} is not within 0 to {MAX_DEADLINE:.0f} seconds", "deadline")
        return self._drain.undo() if asked.undo else await self._drain.drain(asked.deadline)

    def draining(self) -> Left:
        """What a drain waits for."""
        return self._drain.left()

    def acknowledge(self, body: dict[str, Any]) -> dict[str, bool]:
        """A router sends no more."""
        asked = typed(body, AcknowledgeBody)
        if asked.in_flight < 0:
            raise RequestError(f"{asked.in_flight} is no number of requests", "in_flight")
        return {"counted": self._drain.acknowledge(asked.reader, asked.in_flight)}

    def stats(self) -> dict[str, Any]:
        """Counts and bytes for people and tests."""
        core = self._core
        slots, layout = core.memory.slots, core.memory.layout
        tiers = (Tier.MEMORY, *self._lower)
        return {
            "epoch": core.epoch,
            "draining": core.draining,
            "memory_bytes": core.memory.size,
            "chunk_bytes": core.memory.chunk_bytes,
            "tiers": {tier.label: self._tier(tier) for tier in tiers},
            "gpu": {"known": self._gpu.known, "keys": len(self._gpu)},
            "slots": slots.counts() if slots is not None else {},
            "leases": sum(session.leases.chunks for session in core.sessions),
            "granted": sum(len(session.grants) for session in core.sessions),
            "connections": {
                "scheduler": len(core.schedulers),
                "worker": len(core.sessions) - len(core.schedulers),
            },
            "pinned": len(self._pins),
            "retire_epoch": core.authority.known.epoch,
            "tenants": core.quotas.stats(),
            "pending_loads": core.loader.pending,
            "write_behind": {
                "pending_chunks": self._writebehind.pending_chunks,
                "pending_bytes": self._writebehind.pending_bytes,
            },
            "counters": {
                **core.counts,
                **core.quotas.counts,
                **core.loader.counts,
                **self._writebehind.counts,
            },
            "tier_counters": {tier.label: dict(lower.counts) for tier, lower in self._lower.items()},
            "fingerprint": layout.fingerprint.hex() if layout is not None else "",
            "model": layout.model if layout is not None else "",
            "description": layout.description if layout is not None else {},
            "requests": self._totals.requests,
            "prompt_tokens": self._totals.prompt_tokens,
            "hits": {"requests": self._totals.requests_hit},
            "hit_tokens": {tier.label: self._totals.hit_tokens[tier] for tier in (Tier.GPU, *tiers)},
        }

    def _tier(self, tier: Tier) -> dict[str, Any]:
        index = self._core.catalog.index(tier)
        below: dict[str, Any] = {}
        if tier in self._lower:
            lower = self._lower[tier]
            below = {"problem": lower.problem, "compression": msgspec.to_builtins(lower.coding.state)}
        return below | {
            "chunks": len(index),
            "bytes": index.bytes,
            "stored_bytes": self._stored_bytes(tier),
            "loaded_bytes": self._loaded_bytes(tier),
        }

    def _stored_bytes(self, tier: Tier) -> int:
        if tier == Tier.MEMORY:
            return self._core.counts["commits_accepted"] * self._core.memory.chunk_bytes
        return self._writebehind.counts[f"bytes_stored_{tier.label}"]

    def _loaded_bytes(self, tier: Tier) -> int:
        if tier != Tier.MEMORY:
            return self._core.loader.counts[f"bytes_loaded_{tier.label}"]
        layout = self._core.memory.layout
        tokens = self._totals.hit_tokens[tier]
        return tokens * self._core.memory.chunk_bytes // layout.chunk_tokens if layout is not None else 0
