"""Assert what the demo found: hits and exactness, never times. Called by .ci/run with the JSON file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MODES = ("round_robin", "routing", "kvist")
EXACT_PROMPTS = 6
CHUNK_TOKENS = 256
KVIST_TOKENS = 0.6


def problems(figures: dict[str, Any]) -> list[str]:
    """Every statement that does not hold."""
    rates = {mode: figures[mode]["hit_rate"]["tokens"] for mode in MODES}
    claims = {
        f"answers from every tier are exact: {figures['exact_problems']}": figures["exact"],
        f"at least {EXACT_PROMPTS} prompts were compared": figures["exact_prompts"] >= EXACT_PROMPTS,
        f"the sessions exceed an engine's KV space: {figures['kv_tokens']}": figures["kv_tokens"]["sessions"]
        > figures["kv_tokens"]["engine"],
        f"the sessions exceed the KV space of all engines: {figures['kv_tokens']}": figures["kv_tokens"][
            "needed"
        ]
        > figures["kv_tokens"]["engine"] * figures["kv_tokens"]["engines"],
        f"Kvist reuses more than both other modes: {rates}": rates["kvist"]
        > max(rates["routing"], rates["round_robin"]),
        f"Kvist reuses at least {KVIST_TOKENS:.0%} of prompt tokens: {rates}": rates["kvist"] >= KVIST_TOKENS,
        f"a killed engine hits from the arena: {figures['restart']}": figures["restart"]["arena_hit_tokens"]
        >= CHUNK_TOKENS,
        f"after down and up, from disk: {figures['restart']}": figures["restart"]["disk_hit_tokens"]
        >= CHUNK_TOKENS,
        "chunks went to memory and disk": all(figures["kvist"]["bytes"]["stored"].values()),
        "chunks were loaded from memory": figures["kvist"]["bytes"]["loaded"]["memory"] > 0,
    }
    return [text for text, holds in claims.items() if not holds]


def main() -> int:
    """0 when everything holds."""
    found = problems(json.loads(Path(sys.argv[1]).read_text()))
    for text in found:
        print(f"does not hold: {text}")
    print("demo figures hold" if not found else f"{len(found)} demo figures do not hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
