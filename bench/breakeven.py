"""Load or recompute: TTFT by the planner beside always loading and never loading, over links of any speed.

    python -m bench.breakeven [--point MB/S:TOKENS ...] [--pieces FOLDER]

A real engine, its agent, and a Redis behind a token bucket (`bench.link`). At each point the same
cached prompt is answered by each rule in turn, three rounds, the order rotating. A load that would take
more than 20 s is not waited for. With --pieces each point is written to a file of its own as it is measured,
those that are there already are not measured again, and the table holds all of them.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from bench import harness
from bench.agent_process import AgentProcess
from bench.engine_worker import EngineWorker
from bench.link import Link
from bench.prompts import model_folder, random_prompt
from kvist_connector.testing.ports import free_port
from kvist_connector.testing.services import missing, redis_binary

BANDWIDTHS: Final = (1, 5, 15, 50, 500)  # MB/s
LENGTHS: Final = (256, 1024, 3072, 5888)  # tokens that are stored
NEW_TOKENS: Final = 32
LONGEST_LOAD: Final = 20.0  # seconds
RULES: Final = ("planned", "always", "never")
GOAL_RATIO: Final = 1.05
_LESSONS: Final = 5  # loads by which the agent learns the speed of a link
_PREFILLS: Final = (512, 1024, 2048, 4096)  # by which it learns the engine's


@dataclass
class Point:
    """TTFT in seconds by rule, and the tokens that the planner loaded."""

    megabytes: float
    tokens: int
    planned: list[float] = field(default_factory=list)
    always: list[float] = field(default_factory=list)
    never: list[float] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For people and files."""
        return f"{self.megabytes:g}-{self.tokens}"

    @property
    def better(self) -> str:
        """The rule whose median is lower; a load that was not waited for is none."""
        if not self.always:
            return "never"
        return min(("always", "never"), key=lambda rule: statistics.median(getattr(self, rule)))

    @property
    def ratio(self) -> harness.Estimate:
        """Planned against the better rule, round by round."""
        return harness.ratio(self.planned, getattr(self, self.better))


class Rig:
    """Engine, agent, link and Redis, ready to be measured."""

    def __init__(self, engine: EngineWorker, agent: AgentProcess, link: Link, rule: Path) -> None:
        self._engine = engine
        self._agent = agent
        self._link = link
        self._rule = rule
        self._token_bytes = 0.0

    def prepare(self) -> None:
        """The engine's prefill is measured, and what a token takes is known."""
        self._rule.write_text("never")
        for number, tokens in enumerate(_PREFILLS):
            self._engine.generate(random_prompt(number, tokens))
        self._agent.flush()
        stats = self._agent.stats()
        self._token_bytes = stats["chunk_bytes"] / 256

    def measure(self, point: Point, rounds: int) -> None:
        """All rounds of one point."""
        prompt = random_prompt(int(100 * point.megabytes) + point.tokens, point.tokens + NEW_TOKENS)
        self._link.bucket.rate = 1e9
        self._rule.write_text("never")
        self._engine.generate(prompt)
        self._agent.flush()
        self._link.bucket.rate = point.megabytes * 1e6
        self._teach(prompt[: 256 + NEW_TOKENS])
        seconds = point.tokens * self._token_bytes / self._link.bucket.rate
        rules = [rule for rule in RULES if rule != "always" or seconds < LONGEST_LOAD]
        for number in range(rounds):
            for rule in rules[number % len(rules) :] + rules[: number % len(rules)]:
                ttft, cached = self._once(prompt, rule)
                getattr(point, rule).append(ttft)
                if rule == "planned":
                    point.loaded.append(cached)
        self._agent.clear("redis")

    def _teach(self, prompt: list[int]) -> None:
        for _ in range(_LESSONS):
            self._once(prompt, "always")

    def _once(self, prompt: list[int], rule: str) -> tuple[float, int]:
        self._engine.ask(op="reset")
        self._agent.clear("memory")
        self._rule.write_text(rule)
        answer = self._engine.generate(prompt)
        return float(answer["ttft"]), int(answer["cached"])


def run(options: harness.Options) -> harness.Result:
    """Every point that is asked for and not there yet; then the table of all."""
    if missing():
        raise SystemExit(missing())
    points = _asked(options)
    folder: Path | None = options.extra.pieces
    known = {point.name: point for point in _pieces(folder)}
    todo = [point for point in points if point.name not in known]
    if todo:
        with _rig() as rig:
            rig.prepare()
            for point in todo:
                rig.measure(point, options.rounds(3, 1))
                known[point.name] = point
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / f"{point.name}.json").write_text(json.dumps(asdict(point)))
    return _result(sorted(known.values(), key=lambda point: (point.megabytes, point.tokens)))


def _asked(options: harness.Options) -> list[Point]:
    if options.extra.point:
        return [Point(float(mega), int(tokens)) for mega, tokens in options.extra.point]
    lengths = LENGTHS[:2] if options.quick else LENGTHS
    return [Point(mega, tokens) for mega in BANDWIDTHS for tokens in lengths]


def _pieces(folder: Path | None) -> Iterator[Point]:
    for path in sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else ():
        yield Point(**json.loads(path.read_text()))


@contextmanager
def _rig() -> Iterator[Rig]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvist-bench-")))
        link = stack.enter_context(Link(stack.enter_context(_redis(folder))))
        rule = folder / "rule"
        rule.write_text("never")
        flags = {
            "redis.urls": f"redis://127.0.0.1:{link.port}/0",
            "redis.lookup-deadline": "5",
            "redis.deadline": "60",
            # What crosses the link is what the planner prices.
            "redis.compression": "none",
            "lookup-deadline": str(LONGEST_LOAD),
        }
        agent = stack.enter_context(
            AgentProcess(
                folder,
                memory="1Gi",
                more=[word for name, value in flags.items() for word in (f"--{name}", value)],
                program=("bench.planned_agent", str(rule)),
            )
        )
        config = {"model": str(model_folder()), "connector": {"agent": str(agent.socket)}}
        engine = stack.enter_context(EngineWorker(config, folder / "engine.log"))
        engine.wait_ready()
        yield Rig(engine, agent, link, rule)


@contextmanager
def _redis(folder: Path) -> Iterator[int]:
    port = free_port()
    command = [
        str(redis_binary()),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(folder),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 30
        while not _listens(port):
            if time.monotonic() > limit:
                raise RuntimeError("redis-server does not listen")
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _result(points: list[Point]) -> harness.Result:
    goals = tuple(
        harness.Goal(
            f"{point.megabytes:g} MB/s, {point.tokens} tokens: planned / {point.better}",
            point.ratio.median,
            GOAL_RATIO,
            False,
            "x",
            (point.ratio.low, point.ratio.high),
        )
        for point in points
    )
    worst = max((point.ratio.median for point in points), default=1.0)
    columns = ("MB/s", "tokens", "planned s", "always s", "never s", "tokens loaded", "planned / better")
    told = f"planned TTFT is {100 * (worst - 1):+.1f} % of the better rule's at worst, {len(points)} points"
    return harness.Result(
        headline=told,
        tables=(harness.Table("TTFT by rule", columns, tuple(map(_row, points)), _NOTE),),
        figures={"points": [asdict(point) for point in points]},
        goals=goals,
    )


_NOTE: Final = (
    f"{NEW_TOKENS} new tokens after the stored ones; medians; - is a load of more than {LONGEST_LOAD:g} s, "
    "which was not waited for."
)


def _row(point: Point) -> tuple[str, ...]:
    medians = [
        f"{statistics.median(times):.2f}" if times else "-"
        for times in (point.planned, point.always, point.never)
    ]
    loaded = str(round(statistics.median(point.loaded)))
    return (f"{point.megabytes:g}", str(point.tokens), *medians, loaded, str(point.ratio))


def _point(text: str) -> tuple[str, str]:
    mega, _, tokens = text.partition(":")
    if not tokens.isdigit() or not mega.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no point: give MB/S:TOKENS, as 15:1024")
    return mega, tokens


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--point",
        type=_point,
        action="append",
        default=[],
        metavar="MB/S:TOKENS",
        help="this one; repeatable",
    )
    parser.add_argument(
        "--pieces", type=Path, metavar="FOLDER", help="keep each point there, and go on from it"
    )


if __name__ == "__main__":
    sys.exit(harness.main("breakeven", run, _arguments))
