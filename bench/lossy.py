"""What compression fp8 does to a model's answers: log-probabilities after rounded KV was loaded.

One engine, one agent whose disk tier rounds. Each prompt is prose; its continuation is the engine's own,
greedy. With KV from elsewhere the engine goes on from the same prompt; where it would take another token,
that is counted and it goes on from the first continuation, so that every token has the same before it:

    computed     the prompt's KV as the engine computed it
    exact copy   the same loaded from the agent's memory, which holds it as it is
    fp8          the same loaded from the disk tier

What "exact copy" differs from "computed" is the engine's own noise: it computes other batches then.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import harness
from bench.agent_process import AgentProcess
from bench.engine_worker import EngineWorker
from bench.prompts import model_folder, prose

CHUNK = 256
CACHED_TOKENS = 4 * CHUNK
NEW_TOKENS = 31
TOP = 20
Step = dict[int, float]  # the likeliest tokens and their log-probabilities


@dataclass
class Condition:
    """What was answered with KV from one place."""

    steps: list[Step] = field(default_factory=list)
    free: list[list[int]] = field(default_factory=list)  # continuations, a prompt each
    ttft: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Effect:
    """One condition against another."""

    mean: float  # of |difference| over the reference's likeliest tokens
    worst: float
    top_mean: float  # of the likeliest token alone
    agreement: float  # share of steps with the same likeliest token
    identical: float  # share of the free continuations' tokens before the first other one


def run(options: harness.Options) -> harness.Result:
    """Log-probabilities with computed, copied and rounded KV of the same prompts, one engine."""
    prompts = prose(model_folder(), options.rounds(8, 2), CACHED_TOKENS + NEW_TOKENS)
    length = 32 if not options.quick else 8
    found = {name: Condition() for name in ("computed", "exact copy", "fp8")}
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        more = ["--disk.compression", "fp8"]
        agent = AgentProcess(Path(folder), memory="1Gi", disk="4Gi", more=more)
        config = {"model": str(model_folder()), "connector": {"agent": str(agent.socket)}}
        with agent, EngineWorker(config, Path(folder) / "engine.log") as engine:
            engine.wait_ready()
            for prompt in prompts:
                _ask_all(engine, agent, prompt, length, found)
            stats = agent.stats()
            stored = sum(path.stat().st_size for path in (Path(folder) / "disk").rglob("*.kvist"))
            share = stored / (stats["tiers"]["disk"]["chunks"] * stats["chunk_bytes"])
    return _result(found, share, len(prompts), length)


def _ask_all(
    engine: EngineWorker, agent: AgentProcess, prompt: list[int], length: int, found: dict[str, Condition]
) -> None:
    engine.ask(op="reset")
    agent.clear("all")
    reference: list[int] = []
    for name, condition in found.items():
        if name == "fp8":
            agent.flush()
            agent.clear("memory")
        if reference:
            engine.ask(op="reset")
        answer = engine.generate(prompt, length, TOP)
        if reference and answer["cached"] < CACHED_TOKENS:
            raise RuntimeError(f"{name}: expected {CACHED_TOKENS} cached tokens, got {answer['cached']}")
        condition.ttft.append(answer["ttft"])
        condition.free.append(list(map(int, answer["tokens"])))
        reference = reference or condition.free[-1]
        condition.steps += _followed(engine, prompt, reference, answer)


def _followed(
    engine: EngineWorker, prompt: list[int], reference: list[int], answer: dict[str, Any]
) -> list[Step]:
    """The likeliest tokens at each place of the reference."""
    steps: list[Step] = []
    while True:
        start = len(steps)
        same = _common(reference[start:], answer["tokens"])
        steps += [
            {int(token): float(value) for token, value in step} for step in answer["logprobs"][: same + 1]
        ]
        if len(steps) == len(reference):
            return steps
        before = [*prompt, *reference[: len(steps)]]
        answer = engine.generate(before, len(reference) - len(steps), TOP)


def _effect(reference: Condition, other: Condition) -> Effect:
    differences, tops, same = [], [], 0
    for before, after in zip(reference.steps, other.steps, strict=True):
        first = max(before, key=lambda token: before[token])
        same += first == max(after, key=lambda token: after[token])
        shared = [token for token in before if token in after]
        differences += [abs(before[token] - after[token]) for token in shared]
        tops += [abs(before[first] - after[first])] if first in after else []
    kept = sum(map(_common, reference.free, other.free))
    return Effect(
        mean=statistics.fmean(differences),
        worst=max(differences),
        top_mean=statistics.fmean(tops),
        agreement=same / len(reference.steps),
        identical=kept / sum(map(len, reference.free)),
    )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(one))


def _result(found: dict[str, Condition], share: float, prompts: int, length: int) -> harness.Result:
    noise = _effect(found["computed"], found["exact copy"])
    effect = _effect(found["exact copy"], found["fp8"])
    rows = tuple(
        (
            name,
            f"{each.mean:.4f}",
            f"{each.worst:.3f}",
            f"{each.top_mean:.4f}",
            f"{each.agreement:.1%}",
            f"{each.identical:.1%}",
        )
        for name, each in (("exact copy / computed", noise), ("fp8 / exact copy", effect))
    )
    columns = (
        "KV of the prompt",
        "mean difference",
        "greatest",
        "mean of top 1",
        "top 1 agrees",
        "same text",
    )
    effects = harness.Table(
        f"Log-probabilities of {prompts} x {length} tokens after {CACHED_TOKENS} cached tokens of prose",
        columns,
        rows,
        f"Differences over the {TOP} likeliest tokens, natural logarithms; same text: tokens of greedy "
        "continuations before the first other one.",
    )
    times = harness.Table(
        f"TTFT of {CACHED_TOKENS} cached + {NEW_TOKENS} new tokens",
        ("KV", "ms, median"),
        tuple((name, f"{1000 * statistics.median(each.ttft):.1f}") for name, each in found.items()),
        f"On disk fp8 takes {share:.1%} of the bytes.",
    )
    return harness.Result(
        headline=f"fp8: mean difference of log-probabilities {effect.mean:.4f} (max {effect.worst:.2f}), "
        f"top 1 agrees in {effect.agreement:.1%}, {share:.1%} of the bytes",
        tables=(effects, times),
        figures={
            "mean_delta": effect.mean,
            "max_delta": effect.worst,
            "top1_agreement": effect.agreement,
            "same_text": effect.identical,
            "noise_mean_delta": noise.mean,
            "noise_top1_agreement": noise.agreement,
            "stored_share": share,
        },
        notes=("fp8 is never on by itself; of another model these figures say nothing: run it.",),
    )


if __name__ == "__main__":
    sys.exit(harness.main("lossy", run))
