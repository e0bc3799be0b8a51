"""What a miss costs: TTFT of unseen prompts with the connector against the same engine without it."""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench import harness
from bench.agent_process import AgentProcess
from bench.engine_worker import EngineWorker
from bench.prompts import model_folder, random_prompt

PROMPT_TOKENS = 2048
GOAL_RATIO = 1.02
# Two equal engines differ by up to 1.5 % from start to start (where their pages happen to lie), which no
# number of rounds evens out: several pairs of engines do.
STARTS = 4


def run(options: harness.Options) -> harness.Result:
    """Two engines side by side, the same unseen prompt to both in turn, order alternating."""
    mine: list[float] = []
    theirs: list[float] = []
    for start in range(options.rounds(STARTS, 1)):
        a, b = _one_start(start, options.rounds(6, 3))
        mine += a
        theirs += b
    ratio = harness.ratio(mine, theirs)
    goal = harness.Goal(
        "miss, with / without connector", ratio.median, GOAL_RATIO, False, "x", (ratio.low, ratio.high)
    )
    rows = (
        ("with connector", f"{1000 * statistics.median(mine):.1f}"),
        ("without", f"{1000 * statistics.median(theirs):.1f}"),
        ("ratio of pairs", str(ratio)),
    )
    return harness.Result(
        headline=f"a miss costs {100 * (ratio.median - 1):+.2f} % TTFT",
        tables=(harness.Table(f"TTFT of {PROMPT_TOKENS} unseen tokens", ("engine", "ms, median"), rows),),
        figures={"ratio": ratio.median, "with": mine, "without": theirs},
        goals=(goal,),
    )


def _one_start(start: int, rounds: int) -> tuple[list[float], list[float]]:
    model = str(model_folder())
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as name:
        folder = Path(name)
        agent = AgentProcess(folder, memory="2Gi")
        configs = {
            "ours": {"model": model, "connector": {"agent": str(agent.socket)}},
            "plain": {"model": model, "connector": None},
        }
        order = sorted(configs, reverse=start % 2 == 1)
        with agent, ExitStack() as stack:
            engines = {
                kind: stack.enter_context(EngineWorker(configs[kind], folder / f"{kind}.log"))
                for kind in order
            }
            for engine in engines.values():
                engine.wait_ready()
                engine.generate(random_prompt(1, PROMPT_TOKENS))
            return _measure(engines["ours"], engines["plain"], rounds)


def _measure(ours: EngineWorker, plain: EngineWorker, rounds: int) -> tuple[list[float], list[float]]:
    seeds = {"ours": 5000, "plain": 5000}

    def once(name: str, engine: EngineWorker) -> float:
        seeds[name] += 1
        answer = engine.generate(random_prompt(seeds[name], PROMPT_TOKENS))
        if answer["cached"]:
            raise RuntimeError(f"the prompt was meant to be unseen, {answer['cached']} tokens were reused")
        return float(answer["ttft"])

    return harness.paired(lambda: once("ours", ours), lambda: once("plain", plain), rounds)


if __name__ == "__main__":
    sys.exit(harness.main("miss", run))
