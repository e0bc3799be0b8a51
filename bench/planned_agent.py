"""A cache agent whose planner may be overruled: the two rules that `breakeven` compares it with.

    python -m bench.planned_agent FILE [flags of the agent]

FILE holds one word that is read at every decision: `planned` (what the agent does), `always` (load all that
can be had) or `never`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvist_connector.agent import loads
from kvist_connector.agent.app import run
from kvist_connector.planner import Plan, PrefillModel, TierPrice, plan_load


def overruled(rule: Path) -> None:
    """From now on the loader of this process asks the file."""

    def plan(
        sizes: Sequence[tuple[TierPrice, int]],
        prefill: PrefillModel | None,
        chunk_tokens: int,
        start_chunk: int = 0,
    ) -> Plan:
        word = rule.read_text()
        if word == "planned":
            return plan_load(sizes, prefill, chunk_tokens, start_chunk)
        return Plan(len(sizes) if word == "always" else 0, 0.0, 0.0, word)

    vars(loads)["plan_load"] = plan


if __name__ == "__main__":
    overruled(Path(sys.argv[1]))
    sys.exit(run(sys.argv[2:]))
