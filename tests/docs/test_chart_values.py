"""The chart's README names every value, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "kvist"


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names; an image of clusters counts as one, and so do Kubernetes' own structures."""
    for name, value in values.items():
        whole = name == "resources" or (prefix == "images." and isinstance(value, dict))
        if isinstance(value, dict) and value and not whole:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_value_is_named_and_nothing_else() -> None:
    rows = [line for line in (CHART / "README.md").read_text().splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
