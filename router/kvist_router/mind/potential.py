"""What hit rate a connector would add in front of engines that have none. Called by mind.py and admin.py.

Every prompt's leading chunks are looked up among those that any engine has computed before, in stores of a
few sizes that all engines would share: what is found there, but not on the GPU of the engine that was chosen,
is what a connector would have loaded. What the engines reuse today is their own figure where they say it
(`prefix_cache.py`), else the router's prediction.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvist_connector.keys import CHUNK_TOKENS
from kvist_router.mind.replica import Replica

STORES = (2**20, 2**22, 2**24)  # tokens that a store holds
REPORT_SECONDS = 300.0

_log = logging.getLogger(__name__)


class Potential:
    """Counts tokens since the start; `clock` is monotonic seconds."""

    def __init__(self, replicas: Mapping[str, Replica], clock: Callable[[], float]) -> None:
        self._replicas = replicas
        self._clock = clock
        self._stores = NestedStores([tokens // CHUNK_TOKENS for tokens in STORES])
        self._found = dict.fromkeys(STORES, 0)
        self._prompt = self._predicted = 0
        self._said, self._said_at = 0, clock()

    def saw(self, replica: Replica, keys: list[bytes], tokens: int, predicted: int) -> None:
        """One prompt goes to a replica; `predicted`: tokens that it reuses by the router's own view."""
        if replica.agent is not None or not keys:
            return
        self._prompt += tokens
        self._predicted += predicted
        for size, chunks in zip(STORES, self._stores.used(keys), strict=True):
            self._found[size] += max(predicted, min(chunks * replica.chunk_tokens, tokens - 1))

    def summary(self) -> dict[str, Any]:
        """Rates of all prompt tokens that went to engines without an agent; `today` says from whom it is."""
        without = [replica for replica in self._replicas.values() if replica.agent is None]
        measured = [replica.prefix_cache for replica in without if replica.prefix_cache is not None]
        asked = sum(figures.queries for figures in measured)
        today = sum(figures.hits for figures in measured) / asked if asked else self._rate(self._predicted)
        return {
            "engines": [replica.name for replica in without],
            "prompt_tokens": self._prompt,
            "today": {"hit_rate": today, "from": "engines" if asked else "router"},
            "with_connector": [
                {"store_tokens": size, "hit_rate": max(today, self._rate(found))}
                for size, found in self._found.items()
            ],
        }

    def tick(self) -> None:
        """Say it in the log now and then, while there is something new to say."""
        now = self._clock()
        if now - self._said_at < REPORT_SECONDS:
            return
        self._said_at = now
        if self._prompt > self._said:
            self._said = self._prompt
            _log.info("%s", sentence(self.summary()))

    def _rate(self, tokens: int) -> float:
        return tokens / self._prompt if self._prompt else 0.0


class NestedStores:
    """LRU stores of growing `capacities` (chunks), to all of which the same is added.

    What is in one is in the larger ones too (Mattson et al., 1970), so each key is kept once: in the layer
    of the smallest store that has it.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self._layers: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in capacities]
        self._rooms = [own - less for own, less in zip(capacities, (0, *capacities), strict=False)]

    def used(self, keys: Sequence[bytes]) -> list[int]:
        """Leading chunks that each store has. Then they are added, the first as the most recent."""
        layers = self._layers
        found: list[int] = []
        for count, key in enumerate(keys):
            if key in layers[0]:
                continue
            has = next((number for number, layer in enumerate(layers) if key in layer), len(layers))
            found += [count] * (has - len(found))
            if has == len(layers):
                break
        found += [len(keys)] * (len(layers) - len(found))
        self._add(keys)
        return found

    def _add(self, keys: Sequence[bytes]) -> None:
        top, *others = self._layers
        for key in reversed(keys):
            if key in top:
                top.move_to_end(key)
                continue
            top[key] = None
            for layer in others:
                layer.pop(key, None)
        for upper, room, lower in zip(self._layers, self._rooms, (*others, OrderedDict()), strict=True):
            while len(upper) > room:
                lower[upper.popitem(last=False)[0]] = None


def sentence(summary: Mapping[str, Any]) -> str:
    """The summary in words."""
    today = summary["today"]["hit_rate"]
    sizes = ", ".join(
        f"{item['hit_rate']:.0%} with room for {item['store_tokens'] // 2**20} million tokens"
        for item in summary["with_connector"]
    )
    return (
        f"{len(summary['engines'])} engines without connector reuse {today:.0%} of "
        f"{summary['prompt_tokens']} prompt tokens; a connector would make that {sizes}"
    )
