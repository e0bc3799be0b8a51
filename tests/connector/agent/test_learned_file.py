"""What eviction has learned outlives the agent: whole, or not at all."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.eviction_traces import workload
from kvist_connector.agent.catalog import Catalog
from kvist_connector.agent.learned_file import LearnedFile
from kvist_connector.eviction import CostAware, Learned, replay
from kvist_connector.eviction.factors import Seen
from kvist_connector.eviction.rates import BUCKETS
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.testing.fake_engine import FakeEngine, prompt_keys

ANSWER = 2  # place of the trait


@pytest.fixture(scope="module")
def learned():
    rule = CostAware()
    replay(workload("chat", seed=1, hours=0.01), 200, rule)
    return rule.learned()


def test_the_next_agent_goes_on_from_what_was_learned(tmp_path, learned):
    LearnedFile(tmp_path / "arena").write({Tier.MEMORY: learned, Tier.DISK: CostAware().learned()})
    found = LearnedFile(tmp_path / "arena").read()
    assert found == {Tier.MEMORY: learned, Tier.DISK: CostAware().learned()}
    assert learned.observations > 0
    assert Catalog("cost", [Tier.DISK], found).learned() == found
    assert [file.name for file in tmp_path.iterdir()] == ["arena.eviction"]


def test_the_file_is_replaced_only_when_something_was_learned(tmp_path, learned):
    first, again = LearnedFile(tmp_path / "arena"), LearnedFile(tmp_path / "arena")
    first.write({Tier.MEMORY: learned})
    there = first.path.stat()
    first.write({Tier.MEMORY: learned})
    again.write(again.read())
    assert (first.path.stat().st_ino, first.path.stat().st_mtime_ns) == (there.st_ino, there.st_mtime_ns)
    again.write({Tier.MEMORY: learned, Tier.DISK: learned})
    assert again.path.stat().st_ino != there.st_ino
    assert LearnedFile(tmp_path / "arena").read() == {Tier.MEMORY: learned, Tier.DISK: learned}


def test_what_could_not_be_written_is_written_later(tmp_path, learned):
    file = LearnedFile(tmp_path / "later" / "arena")
    file.write({Tier.MEMORY: learned})
    file.path.parent.mkdir()
    file.write({Tier.MEMORY: learned})
    assert LearnedFile(tmp_path / "later" / "arena").read() == {Tier.MEMORY: learned}


def test_a_rule_that_learns_nothing_leaves_nothing():
    assert Catalog("lru", [Tier.DISK]).learned() == {}


@given(data=st.data())
def test_a_damaged_file_is_none(tmp_path_factory, learned, data):
    file = LearnedFile(tmp_path_factory.mktemp("damaged") / "arena")
    file.write({Tier.MEMORY: learned})
    whole = file.path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    torn = data.draw(st.booleans())
    file.path.write_bytes(whole[:at] if torn else whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
    assert file.read() == {}


@pytest.mark.parametrize(
    "counts", [[1.0] * (BUCKETS - 1), [float("nan")] * BUCKETS, [-1.0] * BUCKETS, [float("inf")] * BUCKETS]
)
def test_counts_that_nobody_can_have_learned_are_not_believed(tmp_path, counts):
    file = LearnedFile(tmp_path / "arena")
    file.write({Tier.MEMORY: Learned(1, Seen(counts, [0.0] * BUCKETS), {})})
    assert file.read() == {}


def test_what_cannot_be_written_is_said_once(tmp_path, learned, caplog):
    file = LearnedFile(tmp_path / "none" / "arena")
    with caplog.at_level(logging.WARNING):
        file.write({Tier.MEMORY: learned})
        file.write({Tier.MEMORY: learned})
    assert caplog.text.count("a restart learns anew what to evict") == 1
    assert file.read() == {}


async def test_an_agent_that_ends_leaves_it_to_the_next(tmp_path):
    """Of a prompt that came again after an answer of 100 tokens."""
    keys, found = prompt_keys(range(24)), []
    for _ in range(2):
        agent = await AgentProcess.start(tmp_path)
        engine = await FakeEngine.start(agent.socket)
        await engine.store(keys)
        engine.scheduler.send(wire.Step(answers=(wire.AnswerRecord(keys[-1], 100),)))
        await engine.lookup(keys)
        await engine.stop()
        await agent.terminate()
        found.append(LearnedFile(agent.arena).read()[Tier.MEMORY])
    assert 0 < found[0].observations < found[1].observations
    assert found[0].traits[ANSWER, 1 + (100).bit_length()].uses[0] > 0


def test_other_tiers_hear_of_answers_too():
    catalog = Catalog("cost", [Tier.DISK])
    for key in (b"first", b"second"):
        catalog.enter_below(Tier.DISK, key, b"", 0, 1, 0.0)
    catalog.answer_ended(b"first", 3)
    catalog.answer_ended(b"unknown", 3)
    chunk = catalog.get(b"first")
    assert chunk is not None
    catalog.touch(chunk, 1.0)
    assert (ANSWER, 3) in catalog.learned()[Tier.DISK].traits
