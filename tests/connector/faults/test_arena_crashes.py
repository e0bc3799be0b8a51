"""kill -9 at every line of what writes arena, journal, rules and notes: the next agent has what was whole."""

import shutil
import time
from contextlib import contextmanager

import pytest
from tests.connector.faults.killing import killed_everywhere

from kvist_connector.agent.arena_file import ArenaFile
from kvist_connector.agent.catalog import Catalog
from kvist_connector.agent.deletion_log import DeletionLog
from kvist_connector.agent.journal import Journal
from kvist_connector.agent.memory import MemoryTier
from kvist_connector.agent.retired_file import RetiredFile
from kvist_connector.protocol.retired import Retired
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.fake_engine import content, layout, prompt_keys

SLOTS = 4
MEMORY = SLOTS * (16384 + 64) + 3 * 4096
CHAIN = prompt_keys(range(8 * SLOTS))
OTHER = prompt_keys(range(1000, 1008))
pytestmark = pytest.mark.timeout(240)


def opened(folder, epoch):
    """As an agent does at its start."""
    arena = ArenaFile.reserve(folder / "arena", MEMORY)
    catalog = Catalog("lru", [Tier.DISK])
    memory = MemoryTier(arena, Journal(folder / "arena"), catalog, time.monotonic)
    memory.resume(epoch, ())
    return arena, catalog, memory


def store(memory, keys, index, tags=()):
    """As when an engine commits a chunk."""
    (ref,) = memory.allocate(1)
    for rank, view in enumerate(memory.views(ref)):
        view[:] = content(keys[index], rank, len(view))
    memory.commit(ref, keys[index], keys[index - 1] if index else bytes(16), index, tags)
    memory.settle_fresh()


@pytest.fixture
def prepared(tmp_path):
    """A folder with an arena of `chunks`."""

    def make(chunks, tags=("t",)):
        folder = tmp_path / "prepared"
        folder.mkdir()
        arena, _, memory = opened(folder, 1)
        memory.format(layout(), 1)
        for index in range(chunks):
            store(memory, CHAIN, index, tags)
        memory.close()
        arena.give_up()
        return folder

    return make


@contextmanager
def successor(folder):
    """The next agent: keys with their tags; every byte is right, and its books agree."""
    arena, catalog, memory = opened(folder, 5)
    memory.check_integrity()
    found = {}
    for key in catalog.keys(Tier.MEMORY):
        chunk = catalog.resident(key)
        for rank, view in enumerate(memory.views(chunk.ref)):
            assert bytes(view) == content(key, rank, len(view)), "wrong bytes"
            view.release()
        found[key] = chunk.tags
    if memory.slots is not None:
        counts = memory.slots.counts()
        assert counts["reserved"] == 0
        assert sum(counts.values()) == memory.slots.size
        assert counts["committed"] == len(found)
    yield found
    memory.close()
    arena.close()


def commit(folder):
    _, _, memory = opened(folder, 2)
    return lambda: store(memory, CHAIN, 2, ("new",))


def commit_in_place_of_another(folder):
    _, _, memory = opened(folder, 2)
    return lambda: store(memory, OTHER, 0)


def tag(folder):
    _, catalog, memory = opened(folder, 2)
    return lambda: memory.tag(catalog.get(CHAIN[1]), ("more",))


def drop(folder):
    _, catalog, memory = opened(folder, 2)
    return lambda: memory.drop(catalog.get(CHAIN[1]))


def compact(folder):
    _, _, memory = opened(folder, 2)
    return lambda: memory._journal.compact(memory._entries())


def restart(folder):
    return lambda: opened(folder, 2)


def another_model(folder):
    _, _, memory = opened(folder, 2)
    return lambda: memory.format(layout(b"g" * 32), 3)


T, NEW, MORE = ("t",), ("new",), ("more", "t")
# Chunks before, and what may be found afterwards: (key, tags) of the whole state before and after.
BOTH = {CHAIN[0]: T, CHAIN[1]: T}
FULL = dict.fromkeys(CHAIN, T)
CASES = {
    "commit": (commit, 2, [BOTH, BOTH | {CHAIN[2]: NEW}]),
    "commit in place of another": (
        commit_in_place_of_another,
        SLOTS,
        [FULL, dict.fromkeys(CHAIN[:3], T), dict.fromkeys(CHAIN[:3], T) | {OTHER[0]: ()}],
    ),
    "tag": (tag, 2, [BOTH, BOTH | {CHAIN[1]: MORE}]),
    "drop": (drop, 2, [BOTH, {CHAIN[0]: T}]),
    "compaction": (compact, 2, [BOTH]),
    "restart": (restart, 2, [BOTH]),
    "another model": (another_model, 2, [BOTH, {CHAIN[1]: T}, {}]),
}


LONG = ("commit in place of another", "restart", "another model")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] if case in LONG else []) for case in CASES]
)
def test_an_agent_killed_at_any_line_leaves_one_of_the_states_before_and_after(case, prepared, tmp_path):
    work, chunks, states = CASES[case]
    seen, points = [], 0
    for folder, killed in killed_everywhere(prepared(chunks), tmp_path, work):
        points += killed
        with successor(folder) as found:
            assert found in states
            seen.append(states.index(found))
    assert points > 10
    # Never back to an earlier state, and the last one when it came to its end.
    assert seen == sorted(seen)
    assert seen[-1] == len(states) - 1


RULES = [Retired().with_rule("tag", "a", 5), Retired().with_rule("tag", "a", 5).with_rule("tag", "b", 9)]


def rules_in(folder):
    return RetiredFile(folder / "arena", folder / "disk", lambda: 99)


def test_rules_killed_at_any_line_of_their_writing_are_the_old_or_the_new_ones(tmp_path):
    prepared = tmp_path / "prepared"
    (prepared / "disk").mkdir(parents=True)
    rules_in(prepared).write(RULES[0])
    seen = []
    for folder, _ in killed_everywhere(
        prepared, tmp_path, lambda copy: lambda: rules_in(copy).write(RULES[1])
    ):
        seen.append(RULES.index(rules_in(folder).read()))
        # Whatever was left lying is in nobody's way.
        rules_in(folder).write(RULES[1])
        assert rules_in(folder).read() == RULES[1]
    assert seen == sorted(seen)
    assert set(seen) == {0, 1}


def test_notes_of_deletions_killed_at_any_line_are_the_old_or_the_new_ones(tmp_path):
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    DeletionLog(prepared / "arena").keep(CHAIN[:2])

    def work(copy):
        def run():
            log = DeletionLog(copy / "arena")
            log.add(CHAIN[2])
            log.keep(CHAIN[2:3])
            log.keep(())

        return run

    states = [CHAIN[:2], CHAIN[:3], CHAIN[2:3], []]
    seen = [
        states.index(DeletionLog(folder / "arena").read())
        for folder, _ in killed_everywhere(prepared, tmp_path, work)
    ]
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2, 3}


def test_a_note_cut_anywhere_has_the_whole_keys_before_it(tmp_path):
    log = DeletionLog(tmp_path / "arena")
    log.keep(CHAIN[:2])
    data = log.path.read_bytes()
    for length in range(len(data)):
        log.path.write_bytes(data[:length])
        assert log.read() == CHAIN[: length // 16]
    shutil.rmtree(tmp_path)
