"""The demo's result as one JSON document: the keys that CI and people's scripts read. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvist_cli.demo import figures
from kvist_cli.demo.exactness import Check
from kvist_cli.demo.figures import Replay


@dataclass(frozen=True)
class Pressure:
    """How the sessions compare with the engines' KV space, in tokens."""

    sessions: int
    engine: int
    engines: int
    shared: int = 0  # what all sessions begin with: every engine needs its own copy

    @property
    def needed(self) -> int:
        """Tokens that the engines must hold together to recompute nothing, the sessions dealt out to them."""
        return self.sessions + self.shared * (self.engines - 1)

    def __str__(self) -> str:
        both = self.engine * self.engines
        return (
            f"the sessions need {self.needed:,} KV tokens, with {self.shared:,} common ones in each engine: "
            f"{self.needed / both:.2f} x the KV space of all {self.engines} engines; "
            f"one engine holds {self.engine:,}, the sessions {self.sessions / self.engine:.2f} x that"
        )


@dataclass(frozen=True)
class Report:
    """Everything that was measured."""

    replays: Mapping[str, Replay]
    arena_hit_tokens: int
    disk_hit_tokens: int
    checks: Sequence[Check]
    pressure: Pressure
    starts: Mapping[str, float] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """All prompts of the closing check, from every tier."""
        return bool(self.checks) and not any(check.problems for check in self.checks)


def document(report: Report) -> dict[str, Any]:
    """What `--json` writes."""
    prefill = figures.prefill_model(report.replays.values())
    return {
        "exact": report.exact,
        **{mode: figures.summary(replay, prefill) for mode, replay in report.replays.items()},
        "restart": {
            "arena_hit_tokens": report.arena_hit_tokens,
            "disk_hit_tokens": report.disk_hit_tokens,
        },
        "routes": figures.routes(report.replays["kvist"]),
        "exact_prompts": len(report.checks),
        "exact_problems": [problem for check in report.checks for problem in check.problems],
        "kv_tokens": {
            "sessions": report.pressure.sessions,
            "engine": report.pressure.engine,
            "engines": report.pressure.engines,
            "shared": report.pressure.shared,
            "needed": report.pressure.needed,
        },
        "start_seconds": dict(report.starts),
    }
