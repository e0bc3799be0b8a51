"""Whether the KV of answers is worth storing: how often a conversation that goes on finds it again.

Called by scheduler.py; torch-free. A chunk with generated tokens is reused only if the next prompt repeats
the answer token for token. Templates that strip earlier reasoning, and texts that are tokenized anew, make
other tokens of it. So the first such chunk of every answer is remembered by its key, stored or not, and
compared with the prompt that goes on with the same conversation: one that has the prompt before it, token
for token.

    share += WEIGHT * (found again - share)      from 1; chunks of answers are stored while share >= least

Nothing is stored to find that out, so admission comes back by itself. One share for an engine: for a model.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

WEIGHT: Final = 1 / 16
REMEMBERED: Final = 4096  # answers; beyond the oldest go
HEADER_TOKENS: Final = 8  # a template's beginning of an answer, which it may write otherwise later
LEAST_TOKENS: Final = 16  # of a prompt without a whole chunk, to know it again

_log = logging.getLogger(__name__)


class DecodedReuse:
    """`least`: the share of answers found again below which none are stored; 0: they always are."""

    def __init__(self, least: float, chunk_tokens: int) -> None:
        self._least, self._chunk = least, chunk_tokens
        self._answers: OrderedDict[bytes, tuple[bytes, tuple[int, ...]]] = OrderedDict()
        self.share = 1.0

    @property
    def admits(self) -> bool:
        """Whether chunks of answers are stored."""
        return self.share >= self._least

    def answered(self, root: bytes, keys: Sequence[bytes], prompt: Sequence[int]) -> None:
        """The first chunk that holds tokens after `prompt` is computed; `keys` go that far."""
        index = len(prompt) // self._chunk
        tail = tuple(prompt[index * self._chunk : len(prompt) - HEADER_TOKENS])
        if not index and len(tail) < LEAST_TOKENS:
            return
        parent = keys[index - 1] if index else root
        self._answers[parent] = keys[index], tail
        self._answers.move_to_end(parent)
        if len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)

    def asked(self, root: bytes, keys: Sequence[bytes], prompt: Sequence[int]) -> None:
        """A prompt came, whose whole chunks have `keys`: does it go on with an answer?"""
        for index, parent in enumerate((root, *keys[:-1]) if keys else ()):
            answer = self._answers.get(parent)
            if answer is None:
                continue
            key, tail = answer
            start = index * self._chunk
            if tuple(prompt[start : start + len(tail)]) == tail:
                del self._answers[parent]
                self._found(keys[index] == key)

    def _found(self, again: bool) -> None:
        admitted = self.admits
        self.share += WEIGHT * (again - self.share)
        if admitted != self.admits:
            _log.info(
                "%.0f %% of answers are found again when their conversation goes on: their chunks are %s",
                100 * self.share,
                "stored" if self.admits else "not stored any more",
            )
