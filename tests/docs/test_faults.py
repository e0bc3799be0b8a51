"""docs/faults.md names tests that exist, and every row has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [line for line in (ROOT / "docs/faults.md").read_text().splitlines() if line.startswith("| ")][1:]
NAMED = re.compile(r"`(\w+\.py)::(\w+)`")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_fault_is_shown_by_tests_that_exist(row: str) -> None:
    shown = NAMED.findall(row.split("|")[4])
    assert shown, "no test shows it"
    for file, name in shown:
        (path,) = (ROOT / "tests/connector").rglob(file)
        assert re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE), f"{file} has no {name}"
