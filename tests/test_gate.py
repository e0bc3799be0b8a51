"""The gate's own parts: what is asserted of the demo, how steps are told."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def mode(tokens: float) -> dict[str, Any]:
    return {
        "hit_rate": {"tokens": tokens},
        "bytes": {"stored": {"memory": 1, "disk": 1}, "loaded": {"memory": 1, "disk": 0}},
    }


GOOD: dict[str, Any] = {
    "exact": True,
    "exact_prompts": 6,
    "exact_problems": [],
    "kv_tokens": {"sessions": 7000, "engine": 4200, "engines": 2, "needed": 8800},
    "round_robin": mode(0.3),
    "routing": mode(0.5),
    "kvist": mode(0.8),
    "restart": {"arena_hit_tokens": 256, "disk_hit_tokens": 256},
}


def judged(figures: dict[str, Any]) -> list[str]:
    spec = importlib.util.spec_from_file_location("gate_figures", ROOT / ".ci" / "figures.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[str] = module.problems(figures)
    return found


def test_good_figures_hold(tmp_path: Path) -> None:
    assert judged(GOOD) == []
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(GOOD))
    ran = subprocess.run([sys.executable, ROOT / ".ci" / "figures.py", file], check=False, timeout=60)
    assert ran.returncode == 0


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("exact",), False, "exact"),
        (("exact_prompts",), 5, "at least 6 prompts"),
        (("kv_tokens", "sessions"), 3000, "an engine's KV space"),
        (("kv_tokens", "needed"), 8300, "KV space of all engines"),
        (("routing", "hit_rate", "tokens"), 0.9, "more than both"),
        (("kvist", "hit_rate", "tokens"), 0.55, "at least 60%"),
        (("restart", "arena_hit_tokens"), 0, "arena"),
        (("restart", "disk_hit_tokens"), 0, "disk"),
        (("kvist", "bytes", "stored", "disk"), 0, "memory and disk"),
        (("kvist", "bytes", "loaded", "memory"), 0, "loaded from memory"),
    ],
)
def test_each_bad_figure_is_named(path: tuple[str, ...], value: Any, words: str) -> None:
    figures = copy.deepcopy(GOOD)
    part = figures
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert any(words in problem for problem in judged(figures))


def steps(script: str) -> subprocess.CompletedProcess[str]:
    whole = f"set -euo pipefail\n. {ROOT}/.ci/steps.sh\n{script}"
    return subprocess.run(["bash", "-c", whole], check=False, capture_output=True, text=True, timeout=60)


def test_steps_are_timed_and_skipped_ones_say_why() -> None:
    ran = steps("step one true\nskipped two 'no device'\nfinish")
    assert ran.returncode == 0
    assert "=== one: 0 s" in ran.stdout
    assert "=== two SKIPPED: no device" in ran.stdout
    assert "all steps passed" in ran.stdout


def test_a_failed_step_ends_the_gate_with_its_status() -> None:
    ran = steps("step one bash -c 'exit 7'\nstep two echo reached\nfinish")
    assert ran.returncode == 7
    assert "=== one FAILED (exit 7)" in ran.stdout
    assert "reached" not in ran.stdout


def test_what_a_gate_started_is_ended_however_it_ends() -> None:
    ran = steps("AT_END+=('echo removed')\nstep one false\nfinish")
    assert ran.returncode == 1
    assert ran.stdout.endswith("removed\n")


def test_the_budget_is_printed() -> None:
    ran = steps("step one true\nfinish 45 80")
    assert "(budget: 45 min with everything cached, 80 min without)" in ran.stdout


def test_a_machine_without_go_is_told_why_it_runs_no_kubernetes(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 0\n")
    (tmp_path / "id").chmod(0o755)
    assert "Go" in steps(f"PATH={tmp_path}\nno_kubernetes\nPATH=/usr/bin:/bin").stdout


def test_anyone_but_root_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    assert "root" in steps(f"PATH={tmp_path}:$PATH\nno_kubernetes").stdout
