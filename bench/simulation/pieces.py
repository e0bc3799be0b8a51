"""Runs of a simulation that are kept in a folder, so that one that is stopped goes on where it was.

Called by bench/routing.py and bench/capacity73.py. A folder is for one version of the code: what it holds is
taken as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.simulation.cluster import Summary


class Pieces:
    """`folder` None: nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def summary(self, name: str, run: Callable[[], Summary]) -> Summary:
        """The run's, or what was kept of it under `name`."""
        return Summary(**self._kept(name, lambda: asdict(run())))

    def numbers(self, name: str, run: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """The same for plain numbers."""
        return tuple(self._kept(name, lambda: {"numbers": list(run())})["numbers"])

    def _kept(self, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if self._folder is None:
            return run()
        path = self._folder / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}.json"
        if not path.exists():
            part = path.with_suffix(".part")
            part.write_text(json.dumps(run()) + "\n")
            part.replace(path)
        found: dict[str, Any] = json.loads(path.read_text())
        return found
