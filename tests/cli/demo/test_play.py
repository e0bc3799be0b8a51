"""The whole demo against fakes: what is sent, in which order, and what comes out."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvist_cli import models
from kvist_cli.demo import manifests, report, trace
from kvist_cli.demo.errors import DemoError
from kvist_cli.demo.figures import TurnResult
from kvist_cli.demo.play import Demo
from kvist_cli.demo.screen import Screen

MODE_KEYS = {"hit_rate", "saved_seconds", "ttft_ms", "itl_ms", "throughput_tok_s", "bytes", "seconds"}


@pytest.fixture
def demo(whole: trace.Trace, up: Any, tmp_path: Path) -> Demo:
    screen = Screen(whole, Console(file=io.StringIO()))
    return Demo(whole, whole.text, models.DEMO_MODEL, screen, up, tmp_path, token_bytes=23040)


def printed(demo: Demo) -> str:
    assert isinstance(demo.screen.console.file, io.StringIO)
    return demo.screen.console.file.getvalue()


def test_the_document_has_every_key_in_every_mode(demo: Demo) -> None:
    document = report.document(demo.run())
    assert document["exact"] is True
    assert document["exact_prompts"] >= 6
    for mode in ("round_robin", "routing", "kvist"):
        assert set(document[mode]) == MODE_KEYS
        assert set(document[mode]["hit_rate"]) == {"requests", "tokens", "seconds"}
        assert set(document[mode]["bytes"]["stored"]) == {"memory", "disk"}
    assert set(document["restart"]) == {"arena_hit_tokens", "disk_hit_tokens"}
    assert len(document["routes"]) == len(demo.trace.turns)
    assert set(document["routes"][0]) == {"turn", "replica", "predicted_tokens", "actual_tokens"}


def test_turns_hit_after_the_kill_and_after_everything_was_down(demo: Demo) -> None:
    measured = demo.run()
    assert measured.arena_hit_tokens >= 256
    assert measured.disk_hit_tokens >= 256


def test_all_replays_send_equal_requests(demo: Demo, world: Any) -> None:
    demo.run()
    routed = [sent for body in world.requests if (sent := without_time(body))["max_tokens"] != 2]
    count = len(demo.trace.turns)
    # Two passengers write at a time: the order within a replay may differ, what is said may not.
    first, second, third = (sorted(routed[n * count :][:count], key=repr) for n in range(3))
    assert first == second == third


def without_time(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "asked"}


def test_no_turn_is_sent_before_the_router_knows_what_replicas_hold(demo: Demo, world: Any) -> None:
    demo.run()
    after_restart = next(body for body in reversed(world.requests))
    managed = [body for body in world.requests if body["max_tokens"] != 2][len(demo.trace.turns) :]
    assert after_restart["asked"] % 3 == 0
    assert all(body["asked"] % 3 == 0 for body in managed[: len(demo.trace.turns)])


def test_clusters_start_and_stop_one_after_the_other(demo: Demo, world: Any) -> None:
    demo.run()
    lines = [line for line in world.log if line.startswith(("up", "down", "kill"))]
    assert lines == [
        "up demo-round-robin",
        "down demo-round-robin flush=True",
        "up demo-routing",
        "down demo-routing flush=True",
        "up demo-kvist",
        "kill engine-1",
        "down demo-kvist flush=True",
        "up demo-kvist",
        "down demo-kvist flush=True",
    ]


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_one_differing_answer_makes_the_demo_inexact(demo: Demo, world: Any, tier: str) -> None:
    world.wrong_tier = tier
    document = report.document(demo.run())
    assert document["exact"] is False
    assert all(f"answer from {tier} differs" in problem for problem in document["exact_problems"])


def test_a_failure_stops_the_cluster_and_is_told_in_words(demo: Demo, world: Any, up: Any) -> None:
    def broken(manifest: Any, folder: Path) -> Any:
        cluster = up(manifest, folder)
        world.broken = manifest.name == "demo-routing"
        return cluster

    demo.up = broken
    with pytest.raises(DemoError, match="out of order"):
        demo.run()
    assert world.log[-1] == "down demo-routing flush=False"


def test_the_kept_cluster_is_still_up_when_it_is_handed_over(demo: Demo, world: Any) -> None:
    seen: list[str] = []
    keep: Callable[[Any], None] = lambda cluster: seen.append(world.log[-1])  # noqa: E731
    demo.run(keep)
    assert seen
    assert not seen[0].startswith("down")


def test_without_a_terminal_every_turn_is_one_plain_line(demo: Demo) -> None:
    demo.run()
    text = printed(demo)
    assert "\x1b[" not in text
    for mode in manifests.MODES:
        assert sum(line.startswith(f"  {mode} ") for line in text.splitlines()) == len(demo.trace.turns)
    assert "x the KV space of all 2 engines" in text


def test_the_figures_are_printed_for_every_mode(demo: Demo) -> None:
    document = report.document(demo.run())
    demo.screen.show_turns()
    demo.screen.show_summary(document)
    text = printed(demo)
    for label in ("requests hit", "TTFT warm p95", "ITL p50", "throughput", "loaded, disk"):
        assert label in text
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 100, 132, 200])
def test_the_live_table_fits_the_terminal_without_losing_a_figure(demo: Demo, width: int) -> None:
    stream = io.StringIO()
    screen = Screen(demo.trace, Console(file=stream, width=width, force_terminal=True, no_color=True))
    with screen:
        for turn in demo.trace.turns:
            hits = {"gpu": 1824, "memory": 1024}
            result = TurnResult(turn.name, "replica-1", turn.warm, 3000, 48, 2848, hits, 10.25, ())
            for mode in manifests.MODES:
                screen.turn(mode, result)
    last = stream.getvalue().split("Tokens reused")[-1]
    assert "…" not in last
    assert all(turn.name in last for turn in demo.trace.turns)
    assert last.count("10.25 s") == 3 * len(demo.trace.turns)
