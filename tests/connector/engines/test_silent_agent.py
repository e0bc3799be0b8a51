"""An agent that hangs with its connection open: stopped, or on a disk that does not come back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvist_connector.engines.vllm.lookups import ANSWER_DEADLINE, SILENCE, Lookups
from kvist_connector.engines.vllm.outbox import Outbox
from kvist_connector.engines.vllm.requests import RequestState
from kvist_connector.protocol.engine import Answer

CHUNK = 256


class Agent:
    """Takes every message; each wait for an answer takes as long as it may."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked = 0
        self.waits = 0

    def send(self, _: object) -> bool:
        self.asked += 1
        return True

    def take(self) -> list[object]:
        return []

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        self.now += seconds
        return False


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def lookups(agent: Agent) -> Lookups:
    config = SimpleNamespace(chunk_tokens=CHUNK, extra=SimpleNamespace(lora_revisions={}))
    found = Lookups(config, agent, Outbox(), lambda: agent.now)
    found.arena = SimpleNamespace(fingerprint=b"f" * 32)
    found.enabled = True
    return found


def asked(lookups: Lookups) -> RequestState:
    request = SimpleNamespace(
        request_id="r",
        all_token_ids=[7] * CHUNK,
        num_tokens=CHUNK,
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        num_preemptions=0,
    )
    state = RequestState(request, True, (), 0.0, 0.0)
    lookups.ask(state)
    return state


def waited(agent: Agent, lookups: Lookups, state: RequestState) -> float:
    """Seconds until the engine schedules a request."""
    began = agent.now
    lookups.await_first_answer(state, lambda: None)
    while lookups.awaiting(state):
        agent.now += 0.01
    return agent.now - began


def silence(agent: Agent, lookups: Lookups) -> None:
    assert waited(agent, lookups, asked(lookups)) >= ANSWER_DEADLINE
    agent.now += SILENCE


def test_only_the_first_requests_wait_for_an_agent_that_hangs(agent, lookups) -> None:
    silence(agent, lookups)
    waits = agent.waits
    assert [waited(agent, lookups, asked(lookups)) for _ in range(3)] == [0, 0, 0]
    assert agent.waits == waits, "the engine's scheduler was held up"
    assert agent.asked == 4  # its answer would be heard


def test_an_answer_ends_it(agent, lookups) -> None:
    silence(agent, lookups)
    late = asked(lookups)
    lookups.answered(late, Answer(request="r", refs=(), tiers=b"", known=0, pending=False), agent.now)
    assert waited(agent, lookups, asked(lookups)) >= ANSWER_DEADLINE


def test_so_does_another_agent(agent, lookups) -> None:
    silence(agent, lookups)
    lookups.arena = SimpleNamespace(fingerprint=b"g" * 32)
    assert waited(agent, lookups, asked(lookups)) >= ANSWER_DEADLINE


def test_what_it_said_to_load_is_not_waited_for_either(agent, lookups) -> None:
    loading = asked(lookups)
    lookups.answered(loading, Answer(request="r", refs=(), tiers=b"", known=0, pending=True), agent.now)
    assert lookups.awaiting(loading)
    silence(agent, lookups)
    assert not lookups.awaiting(loading)
