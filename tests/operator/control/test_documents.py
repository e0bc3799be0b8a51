"""docs/operations.md says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from kvist_operator.control import reasons
from kvist_operator.control.conditions import Type

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text()


def rows(heading: str) -> dict[str, str]:
    """First cell without quotes -> the rest, of the table below a heading."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M))


def test_every_reason_is_documented_once_in_code_and_page() -> None:
    constants = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}
    assert constants == set(reasons.MEANING)
    assert rows("Reasons") == dict(reasons.MEANING)


def test_every_condition_is_documented() -> None:
    assert set(rows("Conditions")) == {str(item) for item in Type}
