"""Tables of docs/faults.md and docs/controls.md name tests that exist, and every row has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(\w+\.py)::(\w+)`")


def rows(page: str, after: str) -> list[str]:
    """Of the first table behind these words, without its head."""
    text = (ROOT / "docs" / page).read_text().partition(after)[2]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


ROWS = rows("faults.md", "# Faults") + rows("controls.md", "## Shown by")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_what_is_said_is_shown_by_tests_that_exist(row: str) -> None:
    shown = NAMED.findall(row.split("|")[-2])
    assert shown, "no test shows it"
    for file, name in shown:
        texts = [path.read_text() for path in (ROOT / "tests").rglob(file)]
        found = [text for text in texts if re.search(rf"^(async )?def {name}\(", text, re.MULTILINE)]
        assert found, f"{file} has no {name}"
