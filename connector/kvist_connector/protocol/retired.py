"""Which cached state has lost its authority: rules with epochs. Pure; agents and routers keep one each.

An epoch is a number that only grows. Every chunk carries the epoch at which the request that computed it
arrived; a rule of a later epoch retires it, a chunk computed afterwards is good again. What different
agents know is merged: the union of the rules, each with its latest epoch. So it does not matter in
which order, how often or by which way a rule arrives.

When there are too many rules the oldest go, and everything older than they were is retired: a merge
may retire too much, never too little.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec

from kvist_connector.protocol.tags import EVERY_TAG

MAX_RULES: Final = 4096
# Of a tag or a revision, as JSON: all rules together have to fit into one object of a shared tier.
MAX_RULE_BYTES: Final = 960
# Epochs are milliseconds of somebody's clock: one that is further ahead is a mistake, or somebody's trick.
AHEAD: Final = 366 * 86_400_000
# No rule is of this epoch or a later one, so that there are always more.
FARTHEST: Final = 2**51
# Milliseconds since 1970 for as long as anybody cares, and exact in every JSON reader.
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Kind = Literal["tag", "prefix", "revision"]
KINDS: Final[tuple[Kind, ...]] = ("tag", "prefix", "revision")


class Retired(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rules`: epoch by "kind:value"; `floor`: what is older is retired altogether."""

    epoch: Epoch = 0
    floor: Epoch = 0
    rules: dict[str, Epoch] = {}

    def with_rule(self, kind: Kind, value: str, epoch: int) -> Retired:
        """This and one more rule."""
        return self.merge(Retired(epoch=epoch, rules={f"{kind}:{value}": epoch}))

    def merge(self, other: Retired) -> Retired:
        """What either retires."""
        rules = dict(self.rules)
        for rule, epoch in other.rules.items():
            rules[rule] = max(epoch, rules.get(rule, 0))
        floor = max(self.floor, other.floor)
        if len(rules) > MAX_RULES:
            newest_first = sorted(rules.items(), key=lambda item: (-item[1], item[0]))
            floor = max(floor, newest_first[MAX_RULES][1])
            rules = dict(newest_first[:MAX_RULES])
        rules = {rule: epoch for rule, epoch in rules.items() if epoch > floor}
        return Retired(epoch=max(self.epoch, other.epoch, floor), floor=floor, rules=rules)

    def covers(self, other: Retired) -> bool:
        """Whether all that `other` retires is retired here."""
        if self.floor < other.floor:
            return False
        return all(max(self.rules.get(rule, 0), self.floor) >= epoch for rule, epoch in other.rules.items())

    @property
    def newest_prefix(self) -> int:
        """Epoch of the latest rule about a prefix: ancestors of older chunks matter; 0 without any."""
        return max((epoch for rule, epoch in self.rules.items() if rule.startswith("prefix:")), default=0)

    def retires(
        self, epoch: int, tags: Iterable[str], revision: str = "", ancestry: Iterable[bytes] = ()
    ) -> bool:
        """Whether a chunk of this epoch is retired. `ancestry`: its key and those before it in its chain."""
        if epoch < self.floor:
            return True
        if epoch >= self.epoch:
            return False
        tags = tuple(tags)
        if EVERY_TAG in tags and any(e > epoch for rule, e in self.rules.items() if rule.startswith("tag:")):
            return True
        names = [f"tag:{tag}" for tag in tags] + [f"revision:{revision}"]
        names += [f"prefix:{key.hex()}" for key in ancestry]
        return any(self.rules.get(name, 0) > epoch for name in names)
