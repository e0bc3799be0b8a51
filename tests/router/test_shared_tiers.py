"""Chunks in Redis, the object store and the memory of peers count for every replica that reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.protocol.engine import EngineLoad
from kvist_connector.protocol.feed import FEED_VERSION, Delta, Load, Opening, Snapshot, TierSpeed
from kvist_connector.protocol.tiers import SHARED_TIERS, Tier, preferred
from kvist_connector.settings import validate
from kvist_router.mind.mirror import Hit, Mirror
from kvist_router.mind.replica import Replica
from kvist_router.mind.shared import SharedKeys
from kvist_router.settings import IndexSettings, ReplicaSettings

KEYS = [bytes([number]) * 16 for number in range(6)]
FAST, SLOW, BROKEN = 1e9, 1e6, 0.0


def opening() -> Opening:
    return Opening(
        version=FEED_VERSION, epoch=1, replica="r", fingerprint=b"f" * 32, group=0, model="m",
        chunk_tokens=256, block_tokens=32, gpu_known=True, draining=False,
    )  # fmt: skip


def speed(tier: Tier, bandwidth: float) -> TierSpeed:
    return TierSpeed(tier=int(tier), latency_seconds=0.0, bytes_per_second=bandwidth)


class Fleet:
    """Mirrors of replicas of one cluster."""

    def __init__(self) -> None:
        self.shared = SharedKeys()

    def mirror(self, tier: Tier = Tier.MEMORY, keys: list[bytes] | None = None, **reads: float) -> Mirror:
        """`reads`: lower tiers by name, with the bandwidth that the agent reports."""
        found = Mirror(1000, self.shared)
        found.open(opening())
        found.snapshot(Snapshot(sequence=1, tier=int(tier), keys=b"".join(keys or []), last=True))
        found.tiers_answer([speed(Tier[name.upper()], value) for name, value in reads.items()])
        return found


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def delta(mirror: Mirror, tier: Tier, added: list[bytes], removed: list[bytes] | None = None) -> None:
    mirror.delta(Delta(sequence=0, tier=tier, added=b"".join(added), removed=b"".join(removed or [])))


@pytest.mark.parametrize("tier", [Tier.REDIS, Tier.OBJECT])
def test_what_one_published_counts_for_all_that_have_the_tier(fleet: Fleet, tier: Tier) -> None:
    fleet.mirror(tier, KEYS[:3], redis=FAST, object=FAST)
    assert fleet.mirror(redis=FAST, object=FAST).hit(KEYS) == Hit(0, bytes([tier]) * 3)
    assert fleet.mirror(disk=FAST).hit(KEYS) == Hit(0, b"")
    assert fleet.mirror(Tier.MEMORY, KEYS[:1]).hit(KEYS) == Hit(0, bytes([Tier.MEMORY]))


@pytest.mark.parametrize("tier", [Tier.MEMORY, Tier.DISK, Tier.GPU])
def test_a_replicas_own_tiers_count_for_nobody_else(fleet: Fleet, tier: Tier) -> None:
    fleet.mirror(tier, KEYS, redis=FAST, disk=FAST)
    assert fleet.mirror(redis=FAST, disk=FAST).hit(KEYS) == Hit(0, b"")
    assert len(fleet.shared) == 0


def test_a_chain_is_put_together_and_the_better_tier_wins(fleet: Fleet) -> None:
    fleet.mirror(Tier.REDIS, [KEYS[0], KEYS[1], KEYS[3]], redis=FAST)
    fleet.mirror(Tier.OBJECT, [KEYS[2]], object=FAST)
    own = fleet.mirror(Tier.MEMORY, [KEYS[1]], redis=FAST, object=FAST)
    assert own.hit(KEYS) == Hit(0, bytes([Tier.REDIS, Tier.MEMORY, Tier.OBJECT, Tier.REDIS]))
    assert own.missing(KEYS) == KEYS[4:]


def test_a_tier_that_does_not_answer_a_replica_does_not_count_for_it(fleet: Fleet) -> None:
    publisher = fleet.mirror(Tier.REDIS, KEYS[:2], redis=FAST)
    other = fleet.mirror(redis=FAST)
    publisher.tiers_answer([speed(Tier.REDIS, BROKEN)])
    assert publisher.hit(KEYS) == Hit(0, b"")  # not even what it published itself
    assert other.hit(KEYS).chunks == 2
    publisher.tiers_answer([speed(Tier.REDIS, FAST)])
    assert publisher.hit(KEYS).chunks == 2


def test_a_key_counts_until_the_last_one_takes_it_back(fleet: Fleet) -> None:
    one, two = (fleet.mirror(Tier.REDIS, KEYS[:2], redis=FAST) for _ in range(2))
    reader = fleet.mirror(redis=FAST)
    delta(one, Tier.REDIS, KEYS[:1], removed=KEYS[:2])  # removed, then added again
    delta(one, Tier.REDIS, [], removed=KEYS[1:2])  # taken back before
    assert reader.hit(KEYS).chunks == 2
    delta(two, Tier.REDIS, [], removed=KEYS[:2])
    assert reader.hit(KEYS).chunks == 1


def test_a_replica_that_goes_or_starts_anew_takes_its_word_back(fleet: Fleet) -> None:
    one, two = (fleet.mirror(Tier.REDIS, [key], redis=FAST) for key in KEYS[:2])
    reader = fleet.mirror(redis=FAST)
    assert reader.hit(KEYS).chunks == 2
    two.forget()
    assert reader.hit(KEYS).chunks == 1
    one.open(opening())
    assert reader.hit(KEYS).chunks == 0
    assert len(fleet.shared) == 0


def test_each_replica_pays_its_own_price() -> None:
    shared = SharedKeys()

    def replica(bandwidth: float) -> Replica:
        found = Replica(validate(ReplicaSettings, {"url": "http://h:1"}), IndexSettings(), shared)
        found.apply(opening(), 0.0)
        found.apply(Snapshot(sequence=1, tier=int(Tier.REDIS), keys=KEYS[0], last=True), 0.0)
        speeds = (speed(Tier.REDIS, bandwidth),)
        found.apply(
            Load(sequence=2, load=EngineLoad(), speeds=speeds, chunk_bytes=10**6, engine_connected=True), 0.0
        )
        return found

    near, far = replica(FAST), replica(SLOW)
    assert near.speeds.price(Tier.REDIS).seconds(10**6) < far.speeds.price(Tier.REDIS).seconds(10**6)
    assert near.mirror.hit(KEYS).chunks == far.mirror.hit(KEYS).chunks == 1


_STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # mirror
        st.sampled_from(["add", "remove", "open"]),
        st.sampled_from([Tier.MEMORY, Tier.REDIS, Tier.OBJECT]),
        st.lists(st.sampled_from(KEYS), max_size=4),
    ),
    max_size=30,
)


@given(_STEPS)
def test_it_is_the_union_of_what_the_mirrors_say(steps: list[tuple[int, str, Tier, list[bytes]]]) -> None:
    fleet = Fleet()
    mirrors = [fleet.mirror(redis=FAST, object=FAST, peer=FAST) for _ in range(3)]
    held: list[set[tuple[Tier, bytes]]] = [set() for _ in mirrors]
    for number, what, tier, keys in steps:
        if what == "open":
            mirrors[number].open(opening())
            mirrors[number].tiers_answer([speed(tier, FAST) for tier in (*SHARED_TIERS, Tier.PEER)])
            held[number].clear()
        elif what == "add":
            delta(mirrors[number], tier, keys)
            held[number] |= {(tier, key) for key in keys}
        else:
            delta(mirrors[number], tier, [], removed=keys)
            held[number] -= {(tier, key) for key in keys}
    union = {item for one in held for item in one if item[0] is not Tier.MEMORY}
    assert len(fleet.shared) == len(union)
    union |= {(Tier.PEER, key) for one in held for tier, key in one if tier is Tier.MEMORY}
    for mirror, own in zip(mirrors, held, strict=True):
        for key in KEYS:
            tiers = [tier for tier, known in union | own if known == key]
            assert mirror.hit([key]) == Hit(0, bytes(preferred(tiers)[:1]))


def test_what_is_in_a_peers_memory_counts_for_those_that_read_peers(fleet: Fleet) -> None:
    lender = fleet.mirror(Tier.MEMORY, KEYS[:3], peer=FAST)
    assert fleet.mirror(peer=FAST).hit(KEYS) == Hit(0, bytes([Tier.PEER]) * 3)
    assert fleet.mirror(redis=FAST).hit(KEYS) == Hit(0, b"")
    assert fleet.mirror(peer=BROKEN).hit(KEYS) == Hit(0, b"")
    assert lender.hit(KEYS) == Hit(0, bytes([Tier.MEMORY]) * 3)  # its own is nearer


def test_only_memory_is_lent_and_a_peer_is_preferred_to_servers(fleet: Fleet) -> None:
    fleet.mirror(Tier.DISK, KEYS[:1], disk=FAST, peer=FAST)
    fleet.mirror(Tier.REDIS, KEYS[:3], redis=FAST)
    fleet.mirror(Tier.MEMORY, KEYS[:2], peer=FAST)
    reader = fleet.mirror(redis=FAST, peer=FAST)
    assert reader.hit(KEYS) == Hit(0, bytes([Tier.PEER, Tier.PEER, Tier.REDIS]))
    assert reader.missing(KEYS) == KEYS[3:]


def test_what_a_peer_evicts_or_takes_with_it_is_no_more(fleet: Fleet) -> None:
    lender, reader = fleet.mirror(Tier.MEMORY, KEYS[:3], peer=FAST), fleet.mirror(peer=FAST)
    asked = list(KEYS)
    assert reader.hit(asked).chunks == 3
    delta(lender, Tier.MEMORY, [], removed=KEYS[2:3])
    assert reader.hit(asked).chunks == 2
    delta(lender, Tier.MEMORY, KEYS[2:4])
    assert reader.hit(asked).chunks == 4
    lender.forget()
    assert reader.hit(asked).chunks == 0
    assert reader.missing(asked) == asked
