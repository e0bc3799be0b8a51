"""How long an answer became reaches the agent when its request ends."""

from __future__ import annotations

import random

import pytest

CHUNK = 256


def prompt_of(length):
    source = random.Random(7)
    return [source.randrange(4000) for _ in range(length)]


def answers(agent):
    return [answer for step in agent.steps for answer in step.answers]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_an_ended_request_says_how_many_tokens_it_decoded(engine, fake_agent, asynchronous):
    simulator = engine(asynchronous=asynchronous)
    prompt = prompt_of(2 * CHUNK + 5)
    simulator.answer(prompt, 3)
    simulator.answer(prompt + prompt_of(CHUNK), 300)
    fake_agent.wait_for(lambda: len(answers(fake_agent)) == 2)
    keys = [record.last_chunk_key for step in fake_agent.steps for record in step.records]
    assert [(one.last_chunk_key, one.tokens) for one in answers(fake_agent)] == [(keys[0], 3), (keys[1], 300)]


def test_prompts_that_nothing_is_stored_of_say_nothing(engine, fake_agent):
    simulator = engine()
    simulator.answer(prompt_of(CHUNK - 1), 3)
    fake_agent.wait_for(lambda: any(step.records for step in fake_agent.steps))
    simulator.answer(prompt_of(CHUNK), 3)
    fake_agent.wait_for(lambda: answers(fake_agent))
    assert len(answers(fake_agent)) == 1
