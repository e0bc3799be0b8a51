"""Scale, drain and roll: each decision by a table, and whole rollouts against a simulated StatefulSet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_operator.control import reasons
from kvist_operator.control.pods import Pod
from kvist_operator.control.rollout import Action, Decision, Drain, Engines, decide


def pod(ordinal: int, revision: str = "new", **state: object) -> Pod:
    base = Pod(f"e-{ordinal}", f"uid-{ordinal}", ordinal, revision, ready=True, serving=True)
    return replace(base, **state)  # type: ignore[arg-type]


def engines(*pods: Pod, desired: int | None = None, **more: object) -> Engines:
    count = len(pods)
    base = Engines(count if desired is None else desired, count, observed=True, revision="new", pods=pods)
    return replace(base, **more)  # type: ignore[arg-type]


LOADING = {"ready": False, "serving": False}
BROKEN = {**LOADING, "broken": "CrashLoopBackOff"}
GOING = {"ready": False, "terminating": True}


@pytest.mark.parametrize(
    ("given", "action", "replicas", "name", "reason"),
    [
        pytest.param(engines(replicas=None, desired=3), Action.SCALE, 3, None, reasons.STARTING, id="new"),
        pytest.param(engines(pod(0)), Action.NONE, 1, None, reasons.SETTLED, id="settled"),
        pytest.param(engines(pod(0), observed=False), Action.WAIT, 1, None, reasons.STARTING, id="unseen"),
        pytest.param(engines(pod(0), desired=5), Action.SCALE, 5, None, reasons.SCALING, id="grow at once"),
        pytest.param(
            engines(pod(0), pod(1), desired=1), Action.DRAIN, 2, "e-1", reasons.DRAINING, id="drain"
        ),
        pytest.param(
            engines(pod(0), pod(1), desired=1, drains={"e-1": Drain.RUNNING}),
            Action.WAIT,
            2,
            None,
            reasons.DRAINING,
            id="drain runs",
        ),
        pytest.param(
            engines(pod(0), pod(1), pod(2), desired=0, drains={"e-2": Drain.DONE}),
            Action.SCALE,
            2,
            None,
            reasons.SCALING,
            id="drained: one less",
        ),
        pytest.param(
            engines(pod(0), pod(1, **BROKEN), desired=1),
            Action.SCALE,
            1,
            None,
            reasons.SCALING,
            id="broken last",
        ),
        pytest.param(
            engines(pod(0), pod(1), pod(2, **GOING), desired=1),
            Action.WAIT,
            3,
            None,
            reasons.SCALING,
            id="one at a time",
        ),
        pytest.param(
            engines(pod(0), pod(1), desired=2, drains={"e-1": Drain.DONE}),
            Action.UNDRAIN,
            2,
            "e-1",
            reasons.SCALING,
            id="wanted again",
        ),
        pytest.param(
            engines(pod(0, "old"), pod(1, "old")),
            Action.EVICT,
            2,
            "e-1",
            reasons.ROLLING,
            id="roll the highest",
        ),
        pytest.param(
            engines(pod(0, "old"), pod(1, **LOADING)), Action.WAIT, 2, None, reasons.ROLLING, id="roll waits"
        ),
        pytest.param(
            engines(pod(0, "old"), pod(1, **BROKEN)),
            Action.WAIT,
            2,
            None,
            reasons.STALLED,
            id="new one is broken",
        ),
        pytest.param(
            engines(pod(0, "old", **BROKEN), pod(1, "old"), pod(2, **GOING)),
            Action.EVICT,
            3,
            "e-0",
            reasons.ROLLING,
            id="broken first, whatever else goes on",
        ),
        pytest.param(
            engines(pod(0, "old"), pod(1, "old", **LOADING)),
            Action.EVICT,
            2,
            "e-1",
            reasons.ROLLING,
            id="loading before serving",
        ),
        pytest.param(
            engines(pod(0, "old"), pod(1, **GOING, stuck=True), replicas=1, desired=1),
            Action.EVICT,
            1,
            "e-0",
            reasons.ROLLING,
            id="a lost node holds nothing up",
        ),
        pytest.param(
            engines(pod(0), replicas=2, desired=2),
            Action.WAIT,
            2,
            None,
            reasons.STARTING,
            id="a pod is missing",
        ),
    ],
)
def test_the_next_step(given: Engines, action: Action, replicas: int, name: str | None, reason: str) -> None:
    found = decide(given)
    assert (found.action, found.replicas, found.pod.name if found.pod else None, found.reason) == (
        action,
        replicas,
        name,
        reason,
    )


@dataclass
class Simulation:
    """A StatefulSet with OnDelete and Parallel, its pods, and agents; time passes in steps."""

    desired: int
    replicas: int | None = None
    revision: str = "r0"
    pods: dict[int, Pod] = field(default_factory=dict)
    drains: dict[str, Drain] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()  # revisions that never start
    silent: bool = False  # agents never finish a drain: its deadline ends it
    left: list[str] = field(default_factory=list)

    def view(self) -> Engines:
        return Engines(
            self.desired, self.replicas, True, self.revision, tuple(self.pods.values()), dict(self.drains)
        )

    def carry_out(self, decision: Decision) -> None:
        before = [p.name for p in self.pods.values() if p.ready and not p.terminating]
        if decision.action is Action.SCALE:
            self.replicas = decision.replicas
        if decision.pod is not None:
            name, ordinal = decision.pod.name, decision.pod.ordinal
            if decision.action is Action.EVICT:
                self.pods[ordinal] = replace(self.pods[ordinal], terminating=True, ready=False)
            elif decision.action is Action.DRAIN:
                self.drains[name] = Drain.RUNNING
            else:
                del self.drains[name]
        for ordinal, item in self.pods.items():
            if ordinal >= (self.replicas or 0):
                self.pods[ordinal] = replace(item, terminating=True, ready=False)
        after = {p.name for p in self.pods.values() if p.ready and not p.terminating}
        self.left = [name for name in before if name not in after]

    def passes(self) -> None:
        for ordinal, item in list(self.pods.items()):
            if item.terminating:
                del self.pods[ordinal]
                self.drains.pop(item.name, None)
            elif item.revision in self.broken:
                self.pods[ordinal] = replace(item, **BROKEN)  # type: ignore[arg-type]
            else:
                self.pods[ordinal] = replace(item, ready=True, serving=True, broken="")
        for ordinal in range(self.replicas or 0):
            self.pods.setdefault(ordinal, replace(pod(ordinal, self.revision), **LOADING))  # type: ignore[arg-type]
        for name in self.drains:
            self.drains[name] = Drain.DONE

    def run(self, steps: int) -> Decision:
        decision = decide(self.view())
        for _ in range(steps):
            decision = decide(self.view())
            going = [p for p in self.pods.values() if p.terminating]
            self.carry_out(decision)
            self.check(decision, going)
            self.passes()
        return decision

    def check(self, decision: Decision, going: list[Pod]) -> None:
        """At most one serving engine leaves at a time, and only while no other is on its way out."""
        assert len(self.left) <= 1
        if self.left:
            assert not going
        if decision.action is Action.SCALE and self.replicas is not None:
            assert decision.replicas <= max(self.desired, self.replicas)


CHANGES = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["r0", "r1", "r2"]), st.integers(0, 12)), max_size=6
)


@settings(max_examples=300)
@given(CHANGES, st.sets(st.sampled_from(["r1", "r2"])), st.integers(0, 5))
def test_every_sequence_of_changes_ends_as_wanted_and_takes_one_at_a_time(
    changes: list[tuple[int, str, int]], broken: set[str], final: int
) -> None:
    simulation = Simulation(3, broken=frozenset(broken))
    simulation.run(8)
    for desired, revision, steps in changes:
        simulation.desired, simulation.revision = desired, revision
        simulation.run(steps)
    simulation.desired, simulation.revision = final, "r0"  # what works
    decision = simulation.run(80)
    assert decision.action is Action.NONE
    assert sorted(simulation.pods) == list(range(final))
    assert all(p.revision == "r0" and p.ready for p in simulation.pods.values())
    assert not simulation.drains


def test_a_broken_revision_costs_one_engine_only() -> None:
    simulation = Simulation(4, broken=frozenset({"r1"}))
    simulation.run(8)
    simulation.revision = "r1"
    decision = simulation.run(40)
    assert decision.reason == reasons.STALLED
    assert sum(p.ready for p in simulation.pods.values()) == 3
