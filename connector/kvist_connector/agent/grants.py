"""Empty slots handed to scheduler halves ahead of need, so that a store never waits for the agent."""

from __future__ import annotations

from collections.abc import Iterable

from kvist_connector.agent.memory import MemoryTier
from kvist_connector.protocol.engine import SlotRef

TARGET_CHUNKS = 64
_SHARE = 4  # at most a quarter of the arena lies empty in grants


class Grants:
    """The slots one scheduler half holds."""

    def __init__(self, memory: MemoryTier) -> None:
        self._memory = memory
        self._held: dict[int, SlotRef] = {}

    def __len__(self) -> int:
        return len(self._held)

    def target(self) -> int:
        """Slots to hold: enough for 64 chunks or a quarter of the arena, whichever is less."""
        geometry = self._memory.geometry
        slots = geometry.slots if geometry is not None else 0
        return min(TARGET_CHUNKS, max(1, slots // _SHARE)) if slots else 0

    def refill(self) -> tuple[SlotRef, ...]:
        """Newly granted slots; fewer than wanted when all else is leased."""
        refs = self._memory.allocate_up_to(self.target() - len(self._held))
        self._held.update((ref.slot, ref) for ref in refs)
        return tuple(refs)

    def take(self, ref: SlotRef) -> bool:
        """The holder is done with a slot; false when it never had this one."""
        if self._held.get(ref.slot) != ref:
            return False
        del self._held[ref.slot]
        return True

    def give_up(self) -> Iterable[SlotRef]:
        """Everything still held, once: the connection ended or the arena changed."""
        refs = list(self._held.values())
        self._held.clear()
        return refs
