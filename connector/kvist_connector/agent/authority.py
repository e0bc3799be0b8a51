"""What is retired, as the agent's parts ask it: at each commit, each read from a tier, each start.

Every part asks on its own when it admits a chunk, so that none depends on another having cleaned up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvist_connector.protocol.retired import Retired


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
        index: int,
        epoch: int | None,
        tags: Iterable[str],
        parents: Mapping[bytes, bytes] | None = None,
    ) -> bool:
        """Whether the chunk at `index` of its chain is retired; an unknown epoch is the oldest.

        `parents`: more of them than the catalog knows. Where a chain has a gap nobody knows what the
        chunk follows: then every prefix counts as its own.
        """
        age = epoch or 0
        if age >= self.known.epoch:
            return False
        newest = self.known.newest_prefix
        if newest <= age:
            return self.known.retires(age, tags, self.revision)
        ancestry = self._ancestry(key, parent, index, parents or {})
        return ancestry is None or self.known.retires(age, tags, self.revision, ancestry)

    def surely_retires(
        self,
        key: bytes,
        parent: bytes,
        index: int,
        epoch: int,
        tags: Iterable[str],
        parents: Mapping[bytes, bytes],
    ) -> bool:
        """The same, for what nobody is about to use: behind a gap in its chain a chunk has no prefix."""
        ancestry = self._ancestry(key, parent, index, parents)
        return self.known.retires(epoch, tags, self.revision, ancestry or ())

    def _ancestry(
        self, key: bytes, parent: bytes, index: int, parents: Mapping[bytes, bytes]
    ) -> list[bytes] | None:
        """The chunk and those before it; None when one is not known."""
        found, before = [key], parent
        for _ in range(index):
            found.append(before)
            known = parents.get(before) or self.parent_of(before)
            if known is None:
                return None
            before = known
        return found
