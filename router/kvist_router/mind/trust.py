"""How far what a view claims is found: predicted against actual reuse of one replica.

Called by mind/outcome.py, which compares, and replica.py, which asks. A view that goes on claiming what the
engine does not find is believed to the share that it does: its claims shrink until they are met, so evidence
goes on coming. Time forgives, or a replica that nothing is predicted for could never prove itself again.
"""

from __future__ import annotations

from typing import Final

WEIGHT: Final = 1 / 8
DOUBT: Final = 0.7  # between lookup and prefill chunks come and go: above this nothing is wrong
FORGIVEN: Final = 1 / 600  # of the rest, each second


class Trust:
    """`share`: found of what was predicted, a moving mean."""

    def __init__(self) -> None:
        self.share = 1.0
        self.doubted = False  # whether the view is not believed as it is

    @property
    def believed(self) -> float:
        """By how much of what the view claims is counted with."""
        return self.share if self.doubted else 1.0

    def compared(self, predicted: int, found: int) -> bool:
        """A request's tokens, predicted and found; true when that begins a doubt."""
        before = self.doubted
        self._move(WEIGHT * (min(1.0, found / predicted) - self.share))
        return self.doubted and not before

    def tick(self) -> None:
        """Once a second."""
        self._move(FORGIVEN * (1.0 - self.share))

    def _move(self, by: float) -> None:
        self.share += by
        self.doubted = self.share < DOUBT
