"""TTFT of a 4,096-token cached prompt: cold, from memory, from disk, from the engine's own cache."""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bench import harness
from bench.agent_process import AgentProcess
from bench.engine_worker import EngineWorker
from bench.prompts import model_folder, random_prompt

CACHED_TOKENS = 4096
NEW_TOKENS = 32
GOAL_MEMORY_RATIO = 30.0
GOAL_DISK_RATIO = 20.0
GOAL_OVERHEAD_SECONDS = 0.010


@dataclass
class Samples:
    """Seconds by kind of run; `parts` holds (lookup, wait, copy) of each memory hit."""

    cold: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    local: list[float] = field(default_factory=list)
    parts: list[tuple[float, float, float]] = field(default_factory=list)


def run(options: harness.Options) -> harness.Result:
    """Cold, memory, disk and local hit of the same prompt in every round, one engine."""
    samples = Samples()
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        agent = AgentProcess(Path(folder), memory="1Gi", disk="4Gi")
        config = {"model": str(model_folder()), "connector": {"agent": str(agent.socket)}}
        with agent, EngineWorker(config, Path(folder) / "engine.log") as engine:
            engine.wait_ready()
            engine.generate(random_prompt(1, 512))
            for index in range(options.rounds(7, 2)):
                _round(engine, agent, samples, 1000 + index)
    return _result(samples)


def _round(engine: EngineWorker, agent: AgentProcess, samples: Samples, seed: int) -> None:
    prompt = random_prompt(seed, CACHED_TOKENS + NEW_TOKENS)
    agent.forget_records()
    samples.cold.append(_ttft(engine, prompt, expect=0))
    agent.record()
    samples.local.append(_ttft(engine, prompt, expect=CACHED_TOKENS))
    agent.record()
    engine.ask(op="reset")
    samples.memory.append(_ttft(engine, prompt, expect=CACHED_TOKENS))
    record = agent.record()
    samples.parts.append((record.lookup_seconds, record.wait_seconds, record.load_seconds))
    agent.flush()
    agent.clear("memory")
    engine.ask(op="reset")
    samples.disk.append(_ttft(engine, prompt, expect=CACHED_TOKENS))
    agent.record()


def _ttft(engine: EngineWorker, prompt: list[int], expect: int) -> float:
    answer = engine.generate(prompt)
    if answer["cached"] != expect:
        raise RuntimeError(f"expected {expect} cached tokens, the engine reused {answer['cached']}")
    return float(answer["ttft"])


def _result(samples: Samples) -> harness.Result:
    memory = harness.estimate([c / m for c, m in zip(samples.cold, samples.memory, strict=True)])
    disk = harness.estimate([c / d for c, d in zip(samples.cold, samples.disk, strict=True)])
    # The local hit computes the same last step without any load: what is left is Kvist's own part.
    rest = harness.estimate(
        [m - local - p[2] for m, local, p in zip(samples.memory, samples.local, samples.parts, strict=True)]
    )
    goals = (
        _goal("memory hit, cold / hit", memory, GOAL_MEMORY_RATIO, at_least=True, unit="x"),
        _goal("disk hit, cold / hit", disk, GOAL_DISK_RATIO, at_least=True, unit="x"),
        _goal("memory hit less copy and compute", rest, GOAL_OVERHEAD_SECONDS, at_least=False, unit=" s"),
    )
    return harness.Result(
        headline=f"memory hit {memory.median:.1f}x, disk hit {disk.median:.1f}x lower TTFT than cold",
        tables=(_times(samples), _breakdown(samples)),
        figures={
            "cold_s": statistics.median(samples.cold),
            "memory_s": statistics.median(samples.memory),
            "disk_s": statistics.median(samples.disk),
            "local_s": statistics.median(samples.local),
            "memory_ratio": memory.median,
            "disk_ratio": disk.median,
            "overhead_s": rest.median,
        },
        goals=goals,
    )


def _goal(name: str, value: harness.Estimate, limit: float, *, at_least: bool, unit: str) -> harness.Goal:
    return harness.Goal(name, value.median, limit, at_least, unit, (value.low, value.high))


def _times(samples: Samples) -> harness.Table:
    cold = statistics.median(samples.cold)
    kinds = {"cold": samples.cold, "disk": samples.disk, "memory": samples.memory, "engine": samples.local}
    rows = tuple(
        (kind, str(harness.estimate([1000 * v for v in values])), f"{cold / statistics.median(values):.1f}x")
        for kind, values in kinds.items()
    )
    title = f"TTFT of {CACHED_TOKENS} cached + {NEW_TOKENS} new tokens"
    return harness.Table(title, ("from", "ms, median [95 %]", "against cold"), rows)


def _breakdown(samples: Samples) -> harness.Table:
    compute = 1000 * statistics.median(samples.local)
    names = ("lookup", "wait until scheduled", "copy")
    rows = [
        (name, f"{1000 * statistics.median(part[i] for part in samples.parts):.2f}")
        for i, name in enumerate(names)
    ]
    return harness.Table(
        "Where a memory hit goes",
        ("part", "ms, median"),
        (*rows, ("compute of the last step (the engine's own hit)", f"{compute:.2f}")),
        "The wait until scheduled includes the lookup.",
    )


if __name__ == "__main__":
    sys.exit(harness.main("ttft", run))
