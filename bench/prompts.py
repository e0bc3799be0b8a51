"""Prompts of exact lengths for benches: random ids, seeded, so that no two share a prefix by accident."""

from __future__ import annotations

import os
import random
from pathlib import Path

FIRST_ID, LAST_ID = 100, 40_000


def random_prompt(seed: int, tokens: int) -> list[int]:
    """`tokens` ids of a vocabulary of at least 40,000."""
    draw = random.Random(seed)
    return [draw.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)]


def model_folder() -> Path:
    """The demo model; KVIST_TEST_MODEL names another folder. Converts it once when it is not there yet."""
    given = os.environ.get("KVIST_TEST_MODEL")
    if given:
        return Path(given)
    from kvist_cli.models.demo import demo_model

    return demo_model(os.environ)
