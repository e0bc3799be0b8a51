"""The supervisor over real processes: order, restarts, bounds, and that nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest

from kvist_cli.local import ClusterError, Event, EventKind
from kvist_cli.local.cluster import claim
from kvist_cli.local.state import Phase, RunFolder

Until = Callable[[Callable[[], bool]], None]


def test_programs_start_in_order_and_end_in_order_with_a_flush_between(stage: Any) -> None:
    agent, engine = stage.program("agent-0"), stage.program("engine-0", after=("agent-0",))
    router = stage.program("router", after=("engine-0",))
    cluster = stage.run(router, engine, agent)
    assert agent.arena is not None
    agent.arena.write_bytes(b"x")
    cluster.down()
    assert stage.journal == [
        "agent-0 start", "engine-0 start", "router start",
        "router term", "engine-0 term", "agent-0 flush", "agent-0 term",
    ]  # fmt: skip
    assert not agent.arena.exists()
    assert RunFolder(stage.folder).read() is None


def test_down_without_flush_asks_for_none_and_can_keep_arenas(stage: Any) -> None:
    agent = stage.program("agent-0")
    cluster = stage.run(agent)
    agent.arena.write_bytes(b"x")
    cluster.down(flush=False, keep_arenas=True)
    cluster.down()
    assert stage.journal == ["agent-0 start", "agent-0 term"]
    assert agent.arena.exists()


def test_the_state_file_says_what_runs(stage: Any) -> None:
    with stage.run(stage.program("engine-0")) as cluster:
        state = RunFolder(stage.folder).read()
        assert state is not None
        (program,) = state.programs
        assert program.phase is Phase.READY
        assert program.identity is not None
        assert program.identity.pid == cluster.pid("engine-0")
        assert cluster.urls.engines == {"replica-0": program.url}


def test_a_killed_program_is_started_again_and_its_neighbour_lives_on(stage: Any) -> None:
    with stage.run(stage.program("agent-0"), stage.program("engine-0")) as cluster:
        neighbour = cluster.pid("agent-0")
        dead = cluster.kill("engine-0")
        cluster.wait_ready("engine-0", 30)
        assert cluster.pid("engine-0") != dead
        assert cluster.pid("agent-0") == neighbour
        kinds = [event.kind for event in stage.events if event.program == "engine-0"]
        assert kinds == ["starting", "ready", "exited", "restarting", "starting", "ready"]


def test_restart_ends_it_politely_and_starts_it(stage: Any) -> None:
    with stage.run(stage.program("agent-0")) as cluster:
        before = cluster.pid("agent-0")
        cluster.restart("agent-0", 30)
        assert cluster.pid("agent-0") != before
        assert stage.journal == ["agent-0 start", "agent-0 term", "agent-0 start"]


def test_a_program_that_never_works_fails_the_start_with_its_last_words(stage: Any) -> None:
    good = stage.program("agent-0")
    with pytest.raises(ClusterError, match=r"engine-0 failed: ended with exit code 3") as failed:
        stage.run(good, stage.program("engine-0", "broken", after=("agent-0",)))
    assert "no such flag: --nonsense" in str(failed.value)
    assert str(stage.folder / "logs" / "engine-0.log") in str(failed.value)
    assert stage.journal[-1] == "agent-0 term"
    assert RunFolder(stage.folder).read() is None


def test_a_program_that_cannot_be_executed_fails_the_start(stage: Any) -> None:
    missing = replace(stage.program("engine-0"), argv=("/nope/python",))
    with pytest.raises(ClusterError, match="engine-0 failed: cannot be started"):
        stage.run(missing)


def test_a_listener_whose_terminal_is_gone_does_not_end_supervision(stage: Any) -> None:
    def gone(_: Event) -> None:
        raise BrokenPipeError

    stage.listener = gone
    with stage.run(stage.program("engine-0")) as cluster:
        cluster.kill("engine-0")
        cluster.wait_ready("engine-0", 30)


def test_a_program_gets_its_own_variables_and_not_those_that_would_mislead_it(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISLEADING", "1")
    program = replace(stage.program("engine-0"), env={"OWN": "2"}, unset=("MISLEADING",))
    with stage.run(program) as cluster:
        environment = psutil.Process(cluster.pid("engine-0")).environ()
    assert environment["OWN"] == "2"
    assert "MISLEADING" not in environment
    assert environment["PATH"] == os.environ["PATH"]


def test_a_program_that_is_never_healthy_fails_after_its_deadline(stage: Any) -> None:
    with pytest.raises(ClusterError, match=r"not healthy after 0\.5 s"):
        stage.run(stage.program("engine-0", "mute", deadline=0.5))


def test_restarts_in_a_row_are_bounded_and_the_rest_goes_on(stage: Any, until: Until) -> None:
    with stage.run(stage.program("agent-0"), stage.program("engine-0", "once")) as cluster:
        cluster.kill("engine-0")
        with pytest.raises(ClusterError, match="engine-0 failed"):
            cluster.wait_ready("engine-0", 30)
        restarting = [e for e in stage.events if e.kind is EventKind.RESTARTING]
        assert [event.seconds for event in restarting] == [0.01, 0.02]
        assert cluster.programs()[0].phase is Phase.READY


def test_children_of_a_killed_program_die_with_it(stage: Any) -> None:
    with stage.run(stage.program("engine-0", "parent")) as cluster:
        child = psutil.Process(int((stage.folder / "engine-0.file").read_text()))
        leader = psutil.Process(cluster.pid("engine-0"))
        # Only the leader is hit, as by an out-of-memory kill.
        leader.kill()
        psutil.wait_procs([child], timeout=30)
        assert not child.is_running()


def test_a_program_that_ignores_sigterm_is_killed_after_the_deadline(stage: Any) -> None:
    stage.options = stage.options.model_copy(update={"stop_deadline": 0.3})
    cluster = stage.run(stage.program("engine-0", "stubborn"))
    process = psutil.Process(cluster.pid("engine-0"))
    cluster.down()
    assert not process.is_running()


def test_abort_kills_everything_at_once(stage: Any) -> None:
    cluster = stage.run(stage.program("engine-0", "stubborn"), stage.program("agent-0"))
    processes = [psutil.Process(cluster.pid(name)) for name in ("engine-0", "agent-0")]
    cluster.abort()
    assert not [p for p in processes if p.is_running()]


def test_a_second_owner_of_the_same_name_is_refused_with_the_first_ones_pid(stage: Any) -> None:
    with (
        stage.run(stage.program("engine-0")),
        pytest.raises(ClusterError, match=r"cluster 'test' is already up \(pid \d+\)"),
    ):
        claim(RunFolder(stage.folder), "test", stage.options, stage.events.append)


def test_an_unknown_program_is_answered_with_the_known_ones(stage: Any) -> None:
    with (
        stage.run(stage.program("engine-0")) as cluster,
        pytest.raises(ClusterError, match="no program 'engine-7'; there are engine-0"),
    ):
        cluster.kill("engine-7")
