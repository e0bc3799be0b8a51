"""What is retired, as the agent's parts ask it: at each commit, each read from a tier, each start.

Every part asks on its own when it admits a chunk, so that none depends on another having cleaned up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from kvist_connector.protocol.retired import Retired

# Longer chains do not exist: a million tokens have 4,096 chunks.
_LONGEST_CHAIN = 65_536


class Authority:
    """`parent_of`: the chunk before one, as far as the catalog knows it."""

    def __init__(self, known: Retired | None = None) -> None:
        self.known = known or Retired()
        self.revision = ""  # of the model that is served
        self.parent_of: Callable[[bytes], bytes | None] = lambda key: None

    def knowing(self, known: Retired) -> Authority:
        """The same agent's, if it knew this."""
        other = Authority(known)
        other.revision, other.parent_of = self.revision, self.parent_of
        return other

    def retires(
        self,
        key: bytes,
        parent: bytes,
        epoch: int | None,
        tags: Iterable[str],
        parents: Mapping[bytes, bytes] | None = None,
    ) -> bool:
        """Whether a chunk is retired; an unknown epoch is the oldest. `parents`: more of them than the
        catalog knows."""
        age = epoch or 0
        if age >= self.known.epoch:
            return False
        ancestry = self._ancestry(key, parent, parents or {}) if self.known.has_prefixes else ()
        return self.known.retires(age, tags, self.revision, ancestry)

    def _ancestry(self, key: bytes, parent: bytes, parents: Mapping[bytes, bytes]) -> Iterator[bytes]:
        yield key
        before: bytes | None = parent
        for _ in range(_LONGEST_CHAIN):
            if before is None:
                return
            yield before
            before = parents.get(before) or self.parent_of(before)
