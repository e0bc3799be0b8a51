"""Made-up requests: those on which routing is tuned, and llm-d's 73 % workload. Same seed, same requests.

The public traces are for the test only. Lengths, pauses and popularity are heavy-tailed, as reported
of served models: a few system prompts are in most prompts, many sessions end after a turn or two.
"""

from __future__ import annotations

import itertools
import random

from bench.simulation.trace import BLOCK_TOKENS, Request

GROUPS, SHARED_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 150, 6000, 1200, 1000


def conversations(seed: int, rate: float, seconds: float) -> list[Request]:
    """Chats that begin at `rate` a second; each turn repeats all before it."""
    rng, ids = random.Random(seed), itertools.count()
    systems = [[next(ids) for _ in range(rng.choice((1, 1, 2, 4, 8)))] for _ in range(24)]
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    start = 0.0
    while (start := start + rng.expovariate(rate)) < seconds:
        now, text = start, [*systems[min(23, int(rng.expovariate(0.3)))]]
        while now < seconds:
            text = [*text, *itertools.islice(ids, max(1, min(200, round(rng.lognormvariate(1.6, 1.1)))))]
            tail, output = rng.randint(1, BLOCK_TOKENS - 1), 1 + int(rng.expovariate(1 / 340))
            rows.append((now, len(text) * BLOCK_TOKENS + tail, output, tuple(text)))
            if rng.random() > 0.5:
                break
            now += 60 * rng.lognormvariate(0, 1)
    return [Request(number, *row) for number, row in enumerate(sorted(rows))]


def agents(seed: int, rate: float, seconds: float) -> list[Request]:
    """Sessions of 5 to 40 steps, a few seconds apart, each with all before it; short answers."""
    rng, ids = random.Random(seed), itertools.count()
    systems = [[next(ids) for _ in range(rng.choice((4, 8, 12)))] for _ in range(6)]
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    start = 0.0
    while (start := start + rng.expovariate(rate)) < seconds:
        now, text = start, [*systems[min(5, int(rng.expovariate(0.8)))]]
        for _ in range(rng.randint(5, 40)):
            text = [*text, *itertools.islice(ids, max(1, min(20, round(rng.lognormvariate(0.5, 0.8)))))]
            output = 1 + int(rng.expovariate(1 / 150))
            if now < seconds and len(text) < 220:
                tail = rng.randint(1, BLOCK_TOKENS - 1)
                rows.append((now, len(text) * BLOCK_TOKENS + tail, output, tuple(text)))
            now += output * 0.02 + 2 * rng.lognormvariate(0, 1)
    return [Request(number, *row) for number, row in enumerate(sorted(rows))]


def documents(seed: int, rate: float, seconds: float) -> list[Request]:
    """Long documents, each with some questions a minute or so apart; short answers."""
    rng, ids = random.Random(seed), itertools.count()
    systems = [[next(ids) for _ in range(rng.choice((1, 1, 2)))] for _ in range(24)]
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    start = 0.0
    while (start := start + rng.expovariate(rate)) < seconds:
        now, text = start, [*systems[min(23, int(rng.expovariate(0.3)))]]
        text = [*text, *itertools.islice(ids, max(2, min(200, round(rng.lognormvariate(3.0, 0.8)))))]
        while now < seconds:
            tail, output = rng.randint(1, BLOCK_TOKENS - 1), 1 + int(rng.expovariate(1 / 150))
            rows.append((now, len(text) * BLOCK_TOKENS + tail, output, tuple(text)))
            if rng.random() > 0.7:
                break
            text = [*text, *itertools.islice(ids, rng.choice((0, 1, 1, 2)))]
            now += 60 * rng.lognormvariate(0, 1)
    return [Request(number, *row) for number, row in enumerate(sorted(rows))]


def prompts(seed: int, rate: float, seconds: float, groups: int = 120, output: int = 600) -> list[Request]:
    """Questions of several lengths under long prompts that are about equally popular."""
    rng, now, fresh = random.Random(seed), 0.0, 10**9
    found: list[Request] = []
    shared = 8
    while (now := now + rng.expovariate(rate)) < seconds:
        first = rng.randrange(groups) * shared
        own = max(1, round(2 * rng.lognormvariate(0, 0.5)))
        blocks = (*range(first, first + shared), *range(fresh, fresh + own))
        fresh += own
        tokens = len(blocks) * BLOCK_TOKENS + rng.randint(1, BLOCK_TOKENS - 1)
        found.append(Request(len(found), now, tokens, 1 + int(rng.expovariate(1 / output)), blocks))
    return found


def shared_prompts(seed: int, rate: float, seconds: float) -> list[Request]:
    """Poisson arrivals of questions under one of 150 long prompts, each shared by 5 users."""
    rng, now, fresh = random.Random(seed), 0.0, 10**9
    found: list[Request] = []
    shared, tokens = SHARED_TOKENS // BLOCK_TOKENS, SHARED_TOKENS + QUESTION_TOKENS
    own = tokens // BLOCK_TOKENS - shared
    while (now := now + rng.expovariate(rate)) < seconds:
        first = rng.randrange(GROUPS) * shared
        blocks = (*range(first, first + shared), *range(fresh, fresh + own))
        fresh += own
        found.append(Request(len(found), now, tokens, ANSWER_TOKENS, blocks))
    return found
