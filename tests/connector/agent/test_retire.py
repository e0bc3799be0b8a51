"""Retirement: nothing retired is ever served, whatever is stored, read, crashes and comes back in between."""

import asyncio
import os
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvist_connector.agent import retired_file
from kvist_connector.agent.retire import lora_tag
from kvist_connector.agent.retired_file import RetiredFile
from kvist_connector.agent.selection import RequestError
from kvist_connector.errors import TierError
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.retired import AHEAD, MAX_RULES, Retired
from kvist_connector.protocol.tags import EVERY_TAG, MAX_TAG_BYTES, MAX_TAGS, merge_tags
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_parts import DEADLINE, AgentParts
from kvist_connector.testing.agent_parts import keys_of as keys
from kvist_connector.testing.fake_engine import FakeEngine

CHAINS = [keys(3, first=1000 * number) for number in range(3)]
TAGS = [("a",), ("b",), ("a", "b")]


class Crash(Exception):  # noqa: N818 - not a fault of the program
    """The agent dies here."""


class Calls(list):
    """Calls of a tier; an event says that there was one."""

    def __init__(self):
        super().__init__()
        self.begun = asyncio.Event()

    def append(self, call):
        super().append(call)
        self.begun.set()


class World:
    """An agent over memory and disk, and its engine; both can be begun anew over what the old ones left."""

    def __init__(self, folder):
        self.folder = folder
        self.harness = self.engine = None

    async def start(self):
        self.harness = await AgentParts.over_disk(self.folder, memory=32 * (16384 + 64) + 8192)
        self.engine = await FakeEngine.start(self.harness.socket)

    async def stop(self):
        if self.engine is not None:
            await self.engine.stop()
            await self.harness.stop()
        self.engine = self.harness = None

    async def restart(self):
        await self.stop()
        await self.start()

    @property
    def retire(self):
        return self.harness.parts.controls.retire

    async def store(self, chain, tags=(), epoch=None):
        epoch = self.retire.known.epoch if epoch is None else epoch
        await self.engine.store(chain, tags=tags, epoch=epoch)
        await self.settled()

    async def settled(self):
        await self.engine.lookup(keys(1, first=9999), "settle")

    async def served(self, chain):
        answer = await self.engine.lookup(chain)
        assert self.engine.holds(chain, answer)
        await self.settled()
        return len(answer.refs)


@asynccontextmanager
async def running(folder):
    world = World(folder)
    await world.start()
    try:
        yield world
        world.harness.check()
    finally:
        await world.stop()


@pytest.fixture
async def world(tmp_path):
    async with running(tmp_path) as found:
        yield found


@pytest.mark.parametrize(
    "rule",
    [{"tag": "a"}, {"keys": [CHAINS[0][0].hex()]}, {"tokens": list(range(8))}, {"revision": ""}],
    ids=lambda rule: next(iter(rule)),
)
async def test_a_rule_takes_every_tier_and_what_is_computed_afterwards_is_good(world, rule):
    await world.store(CHAINS[0], ("a",))
    await world.harness.written()
    did = await world.retire.retire(rule)
    assert (did["chunks"], did["tokens"], did["complete"]) == (3, 24, True)
    assert did["bytes"] == 3 * 16384 + 3 * (16384 + 4096)
    assert await world.served(CHAINS[0]) == 0
    await world.store(CHAINS[0], ("a",))
    assert await world.served(CHAINS[0]) == 3


async def test_an_adapter_is_retired_in_all_revisions_or_in_one(world):
    """The engine's half gives what an adapter computed the adapter's tags."""
    for chain, revision in zip(CHAINS, ("1", "2", ""), strict=True):
        tags = (lora_tag("support"), lora_tag("support", revision)) if revision else (lora_tag("other"),)
        await world.store(chain, tags)
    await world.harness.written()
    assert (await world.retire.retire({"lora": "support", "lora_revision": "2"}))["chunks"] == 3
    assert [await world.served(chain) for chain in CHAINS] == [3, 0, 3]
    assert (await world.retire.retire({"lora": "support"}))["chunks"] == 3
    await world.restart()
    assert [await world.served(chain) for chain in CHAINS] == [0, 0, 3]


LONG = keys(6, first=5000)


async def test_a_prefix_takes_what_follows_a_gap_in_its_chain(world):
    await world.store(LONG)
    world.engine.scheduler.send(wire.Step(bad_keys=LONG[2]))
    await world.settled()
    await world.retire.retire({"keys": [LONG[1].hex()]})
    epoch = world.retire.known.epoch
    await world.engine.store(LONG[:3], start=1, epoch=epoch)
    await world.settled()
    # What was computed before it is not served behind what was computed after it.
    assert await world.served(LONG) == 3


async def test_a_prefix_takes_what_follows_a_gap_on_disk(world):
    await world.store(LONG)
    await world.harness.clear_memory()
    await world.retire.retire({"keys": [LONG[1].hex()], "dry_run": True})
    for key in LONG[1:3]:
        await world.harness.faulty.inner.delete(key)
    assert await world.served(LONG) == 1
    await world.retire.retire({"keys": [LONG[1].hex()]})
    await world.restart()
    await world.engine.store(LONG[:3], start=1, epoch=world.retire.known.epoch)
    await world.settled()
    assert await world.served(LONG) == 3


async def test_dry_run_changes_nothing_and_twice_changes_no_more(world):
    await world.store(CHAINS[0], ("a",))
    await world.harness.written()
    would = await world.retire.retire({"tag": "a", "epoch": 7, "dry_run": True})
    assert (would["chunks"], would["leased"], world.retire.known.epoch) == (3, 0, 0)
    assert await world.served(CHAINS[0]) == 3
    await world.engine.lookup(CHAINS[0][:2], "running", release=False)
    await world.settled()
    did = await world.retire.retire({"tag": "a", "epoch": 7})
    assert (did["chunks"], did["leased"]) == (3, 2)
    again = await world.retire.retire({"tag": "a", "epoch": 7})
    assert (again["chunks"], again["epoch"]) == (0, 7)


async def test_a_rule_whose_sender_left_comes_into_force_before_the_next(world, monkeypatch):
    file = world.harness.parts.controls.retire._file
    loop, begun, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    write = file.write

    def slowly(known):
        loop.call_soon_threadsafe(begun.set)
        assert go.wait(DEADLINE)
        write(known)

    monkeypatch.setattr(file, "write", slowly)
    left = asyncio.create_task(world.retire.retire({"tag": "a"}))
    await asyncio.wait_for(begun.wait(), DEADLINE)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    second = asyncio.create_task(world.retire.retire({"tag": "b"}))
    go.set()
    await second
    assert set(file.read().rules) == set(world.retire.known.rules) == {"tag:a", "tag:b"}


@pytest.mark.parametrize("epoch", [-1, 2**53, 2**64 - 1, 2**52])
async def test_an_epoch_that_is_none_is_refused(world, epoch):
    with pytest.raises(RequestError):
        await world.retire.retire({"tag": "a", "epoch": epoch})
    with pytest.raises(RequestError):
        await world.retire.merge({"retired": {"epoch": epoch, "floor": 0, "rules": {"tag:a": epoch}}})
    assert world.retire.known == Retired()


async def test_a_clock_that_was_years_ahead_leaves_retirements_possible(world):
    far = int(time.time() * 1000) + 3 * AHEAD
    await world.retire.merge({"retired": {"epoch": far, "floor": 0, "rules": {"tag:a": far}}})
    await world.retire.retire({"tag": "b", "epoch": far + 1})
    await world.retire.retire({"tag": "c"})
    assert world.retire.known.rules == {"tag:a": far, "tag:b": far + 1, "tag:c": far + 2}


async def test_a_rule_that_no_request_can_carry_is_refused(world):
    for name in ("tag", "revision", "lora"):
        with pytest.raises(RequestError, match="longer than"):
            await world.retire.retire({name: "\x00" * 200})


async def test_a_store_that_was_under_way_is_not_committed(world):
    await world.retire.retire({"tag": "b", "epoch": 5})
    await world.retire.retire({"tag": "a", "epoch": 9})
    await world.store(CHAINS[0], ("a",), epoch=5)
    assert await world.served(CHAINS[0]) == 0
    assert world.harness.parts.core.counts["commits_retired"] >= 1
    await world.store(CHAINS[0], ("b",), epoch=5)
    assert await world.served(CHAINS[0]) == 3


async def test_a_read_that_was_under_way_is_not_admitted(world):
    await world.store(CHAINS[0], ("a",))
    await world.harness.clear_memory()
    world.harness.faulty.gate.clear()
    message = wire.Lookup(request="r", keys=b"".join(CHAINS[0]), tokens=24)
    world.engine.scheduler.send(message)
    await world.engine.scheduler.expect(wire.Answer, lambda answer: answer.pending)
    retiring = asyncio.create_task(world.retire.retire({"tag": "a"}))
    await world.engine.scheduler.expect(wire.Retired)
    world.harness.faulty.gate.set()
    await retiring
    final = await world.engine.scheduler.expect(wire.Answer, lambda answer: not answer.pending)
    assert not final.refs
    assert await world.served(CHAINS[0]) == 0


async def test_a_write_that_was_under_way_does_not_stay(world):
    world.harness.faulty.gate.clear()
    calls = world.harness.faulty.calls = Calls()
    await world.store(CHAINS[0], ("a",))
    await calls.begun.wait()
    retiring = asyncio.create_task(world.retire.retire({"tag": "a"}))
    await world.engine.scheduler.expect(wire.Retired)
    world.harness.faulty.gate.set()
    await retiring
    await world.harness.written()
    await world.harness.parts.lower[Tier.DISK].settled()
    assert not any(await world.harness.faulty.sizes(CHAINS[0]))
    await world.restart()
    assert await world.served(CHAINS[0]) == 0


async def test_a_retirement_that_cannot_be_made_durable_is_none(world, monkeypatch):
    await world.store(CHAINS[0], ("a",))

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(retired_file, "_replace", full)
    with pytest.raises(TierError, match="the retirement is not in force"):
        await world.retire.retire({"tag": "a"})
    assert world.retire.known == Retired()
    assert await world.served(CHAINS[0]) == 3


async def test_a_file_that_cannot_be_read_retires_all_that_is_stored(world):
    await world.store(CHAINS[0])
    await world.harness.written()
    await world.stop()
    (world.folder / "disk" / "retired.json").write_bytes(b"{")
    await world.start()
    assert await world.served(CHAINS[0]) == 0


async def test_the_engine_is_told_at_once_and_when_it_connects(world):
    await world.retire.retire({"tag": "a", "epoch": 12})
    assert (await world.engine.scheduler.expect(wire.Retired)).epoch == 12
    late = await FakeEngine.connect_scheduler(world.harness.socket, "late")
    assert (await late.expect(wire.Retired)).epoch == 12
    await late.close()


async def test_what_others_know_is_taken_over(world):
    await world.store(CHAINS[0], ("a",))
    known = Retired().with_rule("tag", "a", 40)
    did = await world.retire.merge({"retired": msgspec.to_builtins(known)})
    assert (did["chunks"], did["changed"], world.retire.known) == (3, True, known)
    again = await world.retire.merge({"retired": msgspec.to_builtins(known)})
    assert (again["chunks"], again["changed"]) == (0, False)
    await world.restart()
    assert world.retire.known == known


@pytest.mark.parametrize("body", [{}, {"tag": "a", "revision": "b"}, {"all": True}, {"tokens": [1]}])
async def test_a_rule_has_exactly_one_way(world, body):
    with pytest.raises(RequestError):
        await world.retire.retire(body)


RULES = st.one_of(
    st.sampled_from(["a", "b"]).map(lambda tag: {"tag": tag}),
    st.tuples(st.integers(0, 2), st.integers(0, 2)).map(lambda at: {"keys": [CHAINS[at[0]][at[1]].hex()]}),
)
STEPS = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("retire"), RULES, st.sampled_from(["", "", "before", "between", "after"])),
    st.tuples(st.just("stale"), st.integers(0, 2), st.just(0)),
    st.tuples(st.sampled_from(["restart", "flush", "evict"]), st.just(0), st.just(0)),
)


def doomed(rule):
    """The definition, on its own: chains are told apart by number, chunks by their place."""
    if "tag" in rule:
        return {key for chain, tags in zip(CHAINS, TAGS, strict=True) if rule["tag"] in tags for key in chain}
    key = bytes.fromhex(rule["keys"][0])
    return {later for chain in CHAINS if key in chain for later in chain[chain.index(key) :]}


async def retire(world, rule, crash, replace):
    """With a crash before, between or after the writes of the files."""
    written = []

    def write(path, data):
        if crash == "before" or (crash == "between" and written):
            raise Crash
        replace(path, data)
        written.append(path)
        if crash == "after" and len(written) == 2:
            raise Crash

    retired_file._replace = write
    try:
        await world.retire.retire(rule)
    except Crash:
        await world.restart()
    finally:
        retired_file._replace = replace
    return bool(written)


async def play(steps, folder, replace):
    async with running(folder) as world:
        alive = set()
        for what, first, second in steps:
            if what == "store":
                await world.store(CHAINS[first][:second], TAGS[first])
                alive |= set(CHAINS[first][:second])
            elif what == "stale" and world.retire.known.epoch:
                # Of a request that came before the last rule: at best it is not committed.
                rules = [dict([rule.split(":", 1)]) for rule, epoch in world.retire.known.rules.items()]
                gone = set().union(*(doomed(_as_body(rule)) for rule in rules))
                await world.store(CHAINS[first], TAGS[first], epoch=0)
                alive |= {key for key in CHAINS[first] if key not in gone}
            elif what == "retire" and await retire(world, first, second, replace):
                alive -= doomed(first)
            elif what == "restart":
                await world.restart()
            elif what == "flush":
                await world.harness.written()
            elif what == "evict":
                await world.harness.clear_memory()
                # A restart forgets what was to be written: then memory had the only copy.
                sizes = await world.harness.faulty.sizes(list(alive))
                alive = {key for key, size in zip(alive, sizes, strict=True) if size is not None}
            for chain in CHAINS:
                lead = next((i for i, key in enumerate(chain) if key not in alive), len(chain))
                assert await world.served(chain) == lead
        world.harness.check()


def _as_body(rule):
    ((kind, value),) = rule.items()
    return {"keys": [value]} if kind == "prefix" else {kind: value}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, min_size=2, max_size=12))
def test_nothing_retired_is_ever_served_and_nothing_else_is_lost(steps):
    with TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        asyncio.run(play(steps, Path(folder), retired_file._replace))


EPOCHS = st.integers(0, 6)
NAMES = st.sampled_from(["tag:a", "tag:b", "prefix:00", "revision:r"])
KNOWN = st.builds(
    lambda rules, floor: Retired(epoch=max([floor, *rules.values()]), floor=floor).merge(
        Retired(epoch=max([0, *rules.values()]), rules=rules)
    ),
    st.dictionaries(NAMES, EPOCHS),
    st.integers(0, 2),
)
CHUNK = st.tuples(EPOCHS, st.lists(st.sampled_from(["a", "b", "c", "*"]), max_size=2))


@given(KNOWN, KNOWN, KNOWN, CHUNK)
def test_a_merge_retires_what_either_does_in_any_order(one, two, three, chunk):
    both = one.merge(two)
    assert both == two.merge(one)
    assert both.merge(both) == both == both.merge(one)
    assert one.merge(two).merge(three) == one.merge(two.merge(three))
    assert both.covers(one)
    assert both.covers(two)
    epoch, tags = chunk
    either = one.retires(epoch, tags, "r", [b"\0"]) or two.retires(epoch, tags, "r", [b"\0"])
    assert both.retires(epoch, tags, "r", [b"\0"]) == either


def test_too_many_rules_retire_too_much_and_never_too_little():
    known = Retired()
    for number in range(MAX_RULES + 10):
        known = known.with_rule("tag", f"t{number}", number + 1)
    assert len(known.rules) <= MAX_RULES
    for number in range(MAX_RULES + 10):
        assert known.retires(number, [f"t{number}"])
    assert not known.retires(MAX_RULES + 10, ["t0"])


def test_the_files_are_merged_and_survive_one_another(tmp_path):
    (tmp_path / "disk").mkdir()
    file = RetiredFile(tmp_path / "arena", tmp_path / "disk", lambda: 99)
    file.write(Retired().with_rule("tag", "a", 3))
    (tmp_path / "arena.retired.json").unlink()
    assert file.read() == Retired().with_rule("tag", "a", 3)
    (tmp_path / "arena.retired.json").write_text("nonsense")
    assert file.read().retires(98, [])


@given(st.lists(st.text(max_size=200), max_size=60), st.lists(st.text(max_size=200), max_size=60))
def test_tags_are_never_lost_only_summed_up(one, two):
    merged = merge_tags(one, two)
    assert merged == merge_tags(two, one) == merge_tags(merged, merged)
    assert merged == (EVERY_TAG,) or set(merged) == {*one, *two}
    assert len(merged) <= MAX_TAGS
    assert sum(len(tag.encode()) for tag in merged) <= MAX_TAG_BYTES
