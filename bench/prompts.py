"""Prompts of exact lengths for benches: prose, or random ids, of which no two share a prefix by accident."""

from __future__ import annotations

import os
import random
from pathlib import Path

FIRST_ID, LAST_ID = 100, 40_000


def random_prompt(seed: int, tokens: int) -> list[int]:
    """`tokens` ids of a vocabulary of at least 40,000."""
    draw = random.Random(seed)
    return [draw.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)]


def prose(model: Path, count: int, tokens: int) -> list[list[int]]:
    """Prompts of exactly so many tokens, each another piece of this repository's documentation."""
    from transformers import AutoTokenizer  # heavy: only benches that need text pay for it

    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path("docs").glob("*.md")))
    ids: list[int] = AutoTokenizer.from_pretrained(model)(text, verbose=False).input_ids
    if len(ids) < count * tokens:
        raise ValueError(
            f"{count} prompts of {tokens} tokens are more than the {len(ids)} of docs/: ask for less"
        )
    return [ids[start * tokens : (start + 1) * tokens] for start in range(count)]


def model_folder() -> Path:
    """The demo model; KVIST_TEST_MODEL names another folder. Converts it once when it is not there yet."""
    given = os.environ.get("KVIST_TEST_MODEL")
    if given:
        return Path(given)
    from kvist_cli.models.demo import demo_model

    return demo_model(os.environ)
