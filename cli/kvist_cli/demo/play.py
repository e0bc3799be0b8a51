"""The demo from start to end: three replays, two restarts, the closing check.

Called by entry.py. Whatever happens, every cluster that was started is stopped; engine starts are
timed apart from the replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvist_cli.demo import ending, exactness, figures, manifests, replay
from kvist_cli.demo.client import connect
from kvist_cli.demo.ending import Running
from kvist_cli.demo.figures import Replay
from kvist_cli.demo.replay import Target
from kvist_cli.demo.report import Pressure, Report
from kvist_cli.demo.screen import Screen
from kvist_cli.demo.trace import Trace, Turn
from kvist_operator.spec import CacheCluster

# Starts a cluster: manifest, folder of its state.
Up = Callable[[CacheCluster, Path], Running]


@dataclass
class Demo:
    """One run. `text` is what the closing check is made of, `folder` holds the clusters' state,
    `token_bytes` is the KV size of a token."""

    trace: Trace
    text: str
    model: str
    screen: Screen
    up: Up
    folder: Path
    token_bytes: int
    answers: dict[str, str] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    pressure: Pressure = field(default_factory=lambda: Pressure(0, 0, manifests.REPLICAS))

    def run(self, kept: Callable[[Running], None] | None = None) -> Report:
        """Everything; `kept` is called with the last cluster before it is stopped."""
        with connect() as client:
            replays = {mode: self._replay(mode, client) for mode in manifests.MODES[:-1]}
            mode = manifests.MODES[-1]
            with self._cluster(mode) as cluster:
                target = Target(mode, cluster.urls, client)
                replays[mode] = self._play(target)
                last = ending.ending(self.trace, replays[mode])
                arena = self._kill(cluster, target, last)
            self.screen.note("kvist down: chunks are on disk, the arenas are gone; kvist up again")
            with self._cluster(mode, "again") as cluster:
                target = Target(mode, cluster.urls, client)
                target.wait_routable(target.urls.engines)
                disk = self._ask_again(target, last.after_restart, "disk")
                checks = self._check(target)
                report = Report(replays, arena, disk, checks, self.pressure, self.starts)
                if kept is not None:
                    kept(cluster)
        return report

    def _replay(self, mode: str, client: httpx.Client) -> Replay:
        with self._cluster(mode) as cluster:
            return self._play(Target(mode, cluster.urls, client))

    def _play(self, target: Target) -> Replay:
        self.screen.note(f"{manifests.TITLES[target.mode]}: replaying {len(self.trace.turns)} turns")
        played = replay.replay(
            target, self.trace, self.answers, lambda result: self.screen.turn(target.mode, result)
        )
        self.screen.end_table()
        self.screen.note(f"{manifests.TITLES[target.mode]}: replayed in {played.seconds:.0f} s")
        if not self.pressure.sessions:
            self.pressure = self._measure_pressure(target)
            self.screen.note(str(self.pressure))
        return played

    @contextmanager
    def _cluster(self, mode: str, again: str = "") -> Iterator[Running]:
        """A cluster that is stopped on the way out; cleanly, so flushed, when nothing went wrong."""
        self.screen.note(f"{manifests.TITLES[mode]}: starting {manifests.REPLICAS} engines")
        began = time.monotonic()
        cluster = self.up(manifests.manifest(mode, self.model), self.folder / mode)
        self.starts[f"{mode}{'_' if again else ''}{again}"] = time.monotonic() - began
        done = False
        try:
            yield cluster
            done = True
        finally:
            cluster.down(flush=done)

    def _kill(self, cluster: Running, target: Target, last: ending.Ending) -> int:
        session = last.after_kill.session
        self.screen.note(f"kill -9 of the engine of {last.replica}, which answered {session} last")
        self.starts["killed_engine"] = seconds = ending.kill_engine(cluster, target, last.replica)
        self.screen.note(f"the engine is back after {seconds:.0f} s, its own KV is empty")
        return self._ask_again(target, last.after_kill, "memory")

    def _ask_again(self, target: Target, turn: Turn, tier: str) -> int:
        result, _ = target.ask(self.trace, turn, self.answers)
        hit = ending.hit_from(result.hits, tier)
        self.screen.note(
            f"next turn {turn.name} on {result.replica}: {hit:,} of {result.prompt_tokens:,} tokens "
            f"from {tier}, TTFT {result.ttft:.2f} s"
        )
        return hit

    def _check(self, target: Target) -> list[exactness.Check]:
        name, engine = next(iter(target.urls.engines.items()))
        bench = exactness.Bench(engine, target.urls.agents[name], target.client)
        checks = []
        for tokens, hit in exactness.prompts(bench.tokens(self.text)):
            check = bench.check(tokens, hit)
            checks.append(check)
            verdict = (
                "; ".join(check.problems) or "equal from gpu, memory and disk, token by token and logprobs"
            )
            self.screen.note(f"exactness, prompt of {len(tokens):,} tokens, {hit:,} reused: {verdict}")
        return checks

    def _measure_pressure(self, target: Target) -> Pressure:
        space = manifests.manifest(target.mode, self.model).spec.engine.kv_cache_memory or 0
        sessions = [target.tokens(messages) for messages in self.trace.whole_sessions(self.answers)]
        return Pressure(
            sessions=figures.distinct_tokens(sessions),
            engine=space // self.token_bytes,
            engines=manifests.REPLICAS,
            shared=figures.shared_tokens(sessions),
        )
