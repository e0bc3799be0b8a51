"""Chunks of answers are stored while the next prompt of their conversation finds them again."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Template

from kvist_connector.engines.vllm.decoded import HEADER_TOKENS, LEAST_TOKENS, REMEMBERED, WEIGHT, DecodedReuse
from kvist_connector.keys import chunk_keys, root_key

CHUNK = 256
ROOT = root_key(b"f" * 32)
# Words are tokens; 1 begins a turn, 2 ends the reasoning.
PLAIN = Template("{% for m in messages %}1 {{ m }} {% endfor %}1")
REASONING = Template(
    "{% for m in messages %}1 {{ m.split(' 2 ')[-1] if not loop.last else m }} {% endfor %}1"
)


def tokens(template: Template, messages: list[str]) -> list[int]:
    return [int(word) for word in template.render(messages=messages).split()]


def words(count: int, seed: int) -> str:
    source = random.Random(seed)
    return " ".join(str(source.randrange(10, 4000)) for _ in range(count))


def conversation(simulator, template: Template, seed: int) -> None:
    """A question, an answer whose first half is reasoning, and the next question."""
    question = words(200, seed)
    answer = [str(token) for token in simulator.answer(tokens(template, [question]), 100)]
    said = " ".join([*answer[:50], "2", *answer[50:]]) if template is REASONING else " ".join(answer)
    simulator.answer(tokens(template, [question, said, words(200, seed + 10**6)]), 2)


def commits(agent) -> list[int]:
    """Index in its chain of everything that was stored."""
    return [commit.index for step in agent.steps for commit in step.commits]


def shares(agent) -> list[float]:
    return [step.load.decoded_reuse for step in agent.steps if step.load is not None]


def test_with_a_template_that_strips_reasoning_answers_are_stored_until_that_is_known(
    engine, fake_agent
) -> None:
    simulator = engine(extra={"decoded_reuse": 0.5})
    for seed in range(11):  # (1 - WEIGHT) ** 11 < 0.5
        conversation(simulator, REASONING, seed)
    fake_agent.wait_for(lambda: shares(fake_agent)[-1] == round((1 - WEIGHT) ** 11, 2))
    # Of each conversation the answer, and the next question.
    assert commits(fake_agent) == [0, 0] * 11
    simulator.answer(tokens(REASONING, [words(200, -1)]), 100)
    simulator.answer(tokens(REASONING, [words(600, -2)]), 2)
    fake_agent.wait_for(lambda: 1 in commits(fake_agent))
    assert commits(fake_agent)[22:] == [0, 1]  # of the prompt alone


def test_a_template_that_keeps_answers_keeps_them_stored_and_brings_that_back(engine, fake_agent) -> None:
    simulator = engine(extra={"decoded_reuse": 0.5})
    for seed in range(2):
        conversation(simulator, PLAIN, seed)
    assert shares(fake_agent)[-1] == 1.0
    for seed in range(2, 13):
        conversation(simulator, REASONING, seed)
    conversation(simulator, PLAIN, 13)
    fake_agent.wait_for(lambda: shares(fake_agent)[-1] > 0.5)


def test_at_zero_answers_are_always_stored(engine, fake_agent) -> None:
    simulator = engine(extra={"decoded_reuse": 0})
    for seed in range(3):
        conversation(simulator, REASONING, seed)
    fake_agent.wait_for(lambda: len(commits(fake_agent)) == 6)


def reuse(least: float = 0.5) -> DecodedReuse:
    return DecodedReuse(least, CHUNK)


@given(st.integers(0, 3 * CHUNK), st.integers(CHUNK, 2 * CHUNK), st.booleans())
def test_who_goes_on_is_told_from_who_only_begins_alike(length: int, answer: int, repeats: bool) -> None:
    source = random.Random(length)
    prompt = [source.randrange(4000) for _ in range(length)]
    said = [source.randrange(4000) for _ in range(answer)]
    found = reuse()
    found.answered(ROOT, chunk_keys(ROOT, prompt + said), prompt)
    other = [*prompt[: -HEADER_TOKENS - 1], 4001, *said] if length > HEADER_TOKENS else [4001] * 300
    found.asked(ROOT, chunk_keys(ROOT, other), other)
    if length % CHUNK > HEADER_TOKENS:
        assert found.share == 1.0
    following = prompt + (said if repeats else [4002, *said])
    found.asked(ROOT, chunk_keys(ROOT, following), following)
    known = length >= CHUNK or length - HEADER_TOKENS >= LEAST_TOKENS
    if length % CHUNK > HEADER_TOKENS:
        assert found.share == (1.0 if repeats or not known else 1 - WEIGHT)


def test_only_so_many_answers_are_remembered() -> None:
    found, prompts = reuse(), [[number] * 30 for number in range(REMEMBERED + 1)]
    for prompt in prompts:
        found.answered(prompt[0].to_bytes(16), chunk_keys(ROOT, [7] * CHUNK), prompt)
    following = prompts[0] + [8] * CHUNK
    found.asked((0).to_bytes(16), chunk_keys((0).to_bytes(16), following), following)
    assert found.share == 1.0
    following = prompts[-1] + [8] * CHUNK
    root = REMEMBERED.to_bytes(16)
    found.asked(root, chunk_keys(root, following), following)
    assert found.share < 1.0
