"""The router: time of a decision, and what its relay costs beside a plain pass-through."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import httpx
import psutil
from prometheus_client import CollectorRegistry

from bench import harness, load
from bench.mock_engine import MODEL
from bench.openings import opening
from bench.prompts import model_folder
from kvist_connector.keys import root_key
from kvist_connector.protocol.feed import Snapshot
from kvist_connector.protocol.tiers import Tier
from kvist_connector.settings import validate
from kvist_connector.testing.ports import free_port
from kvist_router.memory import settle_memory
from kvist_router.metrics import MindMetrics
from kvist_router.mind.interface import Decision, Metadata, Report
from kvist_router.mind.mind import LocalMind
from kvist_router.mind.models import ServedModel
from kvist_router.mind.policies import policy
from kvist_router.mind.prompts import PromptSource
from kvist_router.mind.replica import Replica
from kvist_router.settings import RouterSettings
from kvist_router.tokens.keys import KeyMemo
from kvist_router.tokens.remote import RemoteTokenizer
from kvist_router.tokens.tokenizer import ModelTokenizer

GOAL_DECISION_P50_MS, GOAL_DECISION_P99_MS = 0.3, 1.0
GOAL_CONSTANT_RATIO, GOAL_EXACT_RATIO = 0.95, 0.60

REPLICAS, PROMPTS, PROMPT_TOKENS = 8, 32, 4000
CONNECTIONS, WORDS, ENGINES = 16, 4000, 2
SECONDS = 3.0
FINGERPRINT = b"bench" * 6
APART = "exact, mind apart"
PEER = "vllm-router cache_aware"
ABSENT = (
    "vllm-router, the Rust router of the vLLM project: pip install vllm-router==0.1.17 into an environment "
    "of its own, then --vllm-router ENVIRONMENT/bin/vllm-router"
)
CHAT = Metadata("chat")
VOCABULARY = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "with", "as", "was", "on", "are"]


def run(options: harness.Options) -> harness.Result:
    """Decision time at 4,000 tokens over 8 replicas; throughput of three relay forms, interleaved."""
    folder = model_folder()
    p50, p99, tokens = asyncio.run(_decisions(folder, options.rounds(5000, 500)))
    peer: Path | None = options.extra.vllm_router
    with _forms(folder, peer) as forms:
        for form in forms.values():
            form.measure()  # warm: segment cache, connections
        constant, mine, plain = harness.paired_ratio(
            forms["constant"].rate, forms["passthrough"].rate, options.rounds(10, 2)
        )
        apart, *_ = harness.paired_ratio(forms[APART].rate, forms["passthrough"].rate, options.rounds(10, 2))
        ratios: dict[str, float] = {f"{APART} / passthrough": apart.median}
        exact, whole, _ = harness.paired_ratio(
            forms["exact"].rate, forms["passthrough"].rate, options.rounds(10, 2)
        )
        if peer is not None:
            rust, *_ = harness.paired_ratio(forms["exact"].rate, forms[PEER].rate, options.rounds(10, 2))
            ratios[f"exact / {PEER}"] = rust.median
        rows = tuple(form.row() for form in forms.values())
    return harness.Result(
        headline=f"decision {p50:.3f} ms p50, {p99:.3f} ms p99; relay {100 * constant.median:.0f} % of "
        f"a plain pass-through, with exact decisions {100 * exact.median:.0f} %",
        tables=(
            harness.Table(
                f"Decision: {tokens} tokens over {REPLICAS} replicas",
                ("percentile", "ms"),
                (("p50", f"{p50:.3f}"), ("p99", f"{p99:.3f}")),
                "Parse, render, tokenize, keys, lookup, choice; no new text.",
            ),
            harness.Table(
                f"Relay: {CONNECTIONS} connections, streaming, {WORDS} words",
                ("form", "req/s, median", "first byte p50 ms", "p99 ms", "processor ms per request"),
                rows,
                "Load and mock engines share the machine's cores with the relay. Mind apart: the mind "
                "and one relay have a process each."
                + "".join(f" {name}: {ratio:.2f}." for name, ratio in ratios.items()),
            ),
        ),
        figures={
            "decision_ms": {"p50": p50, "p99": p99},
            "rate": {"constant": mine, "passthrough": plain, "exact": whole},
            "ratio": ratios,
        },
        goals=(
            harness.Goal("decision p50", p50, GOAL_DECISION_P50_MS, unit=" ms"),
            harness.Goal("decision p99", p99, GOAL_DECISION_P99_MS, unit=" ms"),
            _ratio_goal("relay, constant decision / pass-through", constant, GOAL_CONSTANT_RATIO),
            _ratio_goal("relay, exact decision / pass-through", exact, GOAL_EXACT_RATIO),
        ),
        absent=() if peer is not None else (ABSENT,),
    )


def _ratio_goal(name: str, found: harness.Estimate, limit: float) -> harness.Goal:
    return harness.Goal(name, found.median, limit, True, "x", (found.low, found.high))


# ---- decisions


def chat_body(seed: int, words: int) -> bytes:
    """A conversation of ten messages with `words` words of the dictionary below."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(VOCABULARY, k=words // 10)) for _ in range(10)]
    roles = ["system", *["user", "assistant"] * 5]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return json.dumps({"model": MODEL, "messages": messages, "stream": True, "max_tokens": 16}).encode()


async def _decisions(folder: Path, rounds: int) -> tuple[float, float, int]:
    """p50 and p99 in ms, and tokens of a prompt."""
    nowhere = {"url": "http://127.0.0.1:9", "agent": "http://127.0.0.1:9"}
    replicas = [{"name": f"r{number}", **nowhere} for number in range(REPLICAS)]
    settings = validate(RouterSettings, {"replicas": replicas})
    async with aiohttp.ClientSession() as session:
        metrics = MindMetrics(CollectorRegistry())
        tokenizer = ModelTokenizer(folder, settings.tokens.cache_bytes, settings.tokens.inline_characters)
        source = PromptSource(tokenizer, RemoteTokenizer(session, 1.0), metrics, verify=False)
        mind = LocalMind(settings, policy("kvist"), source, metrics)
        bodies = [chat_body(seed, PROMPT_TOKENS - 60) for seed in range(PROMPTS)]
        await _fill(mind, settings, tokenizer, bodies)
        settle_memory()  # as in service
        times, tokens = [], 0
        for index in range(rounds + PROMPTS):
            begin = time.perf_counter()
            decision = await mind.decide(bodies[index % PROMPTS], CHAT)
            times.append(time.perf_counter() - begin)
            assert isinstance(decision, Decision)
            tokens = decision.prompt_tokens
            await mind.report(decision.id, Report("cancelled"))
        warm = times[PROMPTS:]
        return 1000 * harness.percentile(warm, 0.5), 1000 * harness.percentile(warm, 0.99), tokens


async def _fill(
    mind: LocalMind, settings: RouterSettings, tokenizer: ModelTokenizer, bodies: list[bytes]
) -> None:
    """Replicas that hold different shares of every prompt, on the GPU and in memory."""
    memo, root = KeyMemo(100_000), root_key(FINGERPRINT)
    chains = [memo.segment_keys(root, await tokenizer.chat(json.loads(body)), 256) for body in bodies]
    for number, described in enumerate(settings.replicas):
        replica = Replica(described, settings.index)
        replica.healthy, replica.models = True, {MODEL: ServedModel(MODEL, 131072, False)}
        replica.apply(opening(replica.name, MODEL, FINGERPRINT), 0.0)
        held = b"".join(b"".join(keys[: 2 * number]) for keys in chains)
        replica.apply(Snapshot(sequence=1, tier=Tier.GPU, keys=held, last=False), 0.0)
        replica.apply(Snapshot(sequence=2, tier=Tier.MEMORY, keys=held, last=True), 0.0)
        mind.replicas[replica.name] = replica


# ---- relays


class Form:
    """One relay in its own process."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int) -> None:
        self.name, self.port = name, port
        self._process = psutil.Process(process.pid)
        bodies = [chat_body(1000 + seed, WORDS) for seed in range(CONNECTIONS)]
        self._requests = [load.request(port, "/v1/chat/completions", body) for body in bodies]
        self._rates: list[float] = []
        self._first: list[float] = []
        self._processor: list[float] = []

    def measure(self) -> load.Load:
        """Some seconds of load."""
        before = self._seconds()
        found = load.drive(self.port, self._requests, SECONDS)
        self._processor.append((self._seconds() - before) / found.requests)
        return found

    def rate(self) -> float:
        """Requests per second, kept for the table."""
        found = self.measure()
        self._rates.append(found.rate)
        self._first += found.first_byte_seconds
        return found.rate

    def row(self) -> tuple[str, ...]:
        """The line of the table."""
        middle = harness.percentile(self._rates, 0.5)
        times = [1000 * harness.percentile(self._first, share) for share in (0.5, 0.99)]
        processor = 1000 * harness.percentile(self._processor, 0.5)
        return (self.name, f"{middle:.0f}", *(f"{value:.1f}" for value in times), f"{processor:.2f}")

    def _seconds(self) -> float:
        found = [self._process, *self._process.children(recursive=True)]
        return sum(float(item.cpu_times().user + item.cpu_times().system) for item in found)


@contextlib.contextmanager
def _forms(folder: Path, peer: Path | None) -> Iterator[dict[str, Form]]:
    with contextlib.ExitStack() as stack:
        engines = []
        for _ in range(ENGINES):
            port = free_port()
            _start(stack, _module("bench.mock_engine", "--port", str(port)), port, "/health")
            engines.append(f"http://127.0.0.1:{port}")
        forms = {}
        for name, arguments in _commands(engines, folder, peer).items():
            port = free_port()
            ready = {"exact": "/readyz", APART: "/readyz", PEER: "/health"}.get(name)
            process = _start(stack, [*arguments, "--port", str(port)], port, ready)
            forms[name] = Form(name, process, port)
        yield forms


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def _commands(engines: list[str], folder: Path, peer: Path | None) -> dict[str, list[str]]:
    flags = [flag for url in engines for flag in ("--engine", url)]
    replicas = [flag for url in engines for flag in ("--replica", url)]
    model = ["--model.path", str(folder), "--model.verify-cases", "0"]
    router = _module("kvist_router", *replicas, *model, "--admin-port", "0", "--log-level", "warning")
    commands = {
        "passthrough": _module("bench.relay_forms", "passthrough", *flags),
        "constant": _module("bench.relay_forms", "constant", *flags),
        "exact": [*router, "--relays", "0"],
        APART: [*router, "--relays", "1"],
    }
    if peer is not None:
        metrics = ["--prometheus-port", str(free_port()), "--log-level", "error"]
        commands[PEER] = [str(peer), "--worker-urls", *engines, "--policy", "cache_aware", *metrics]
    return commands


def _start(
    stack: contextlib.ExitStack, arguments: list[str], port: int, ready: str | None
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(arguments)
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)
    _wait(lambda: _answers(port, ready), process)
    return process


def _answers(port: int, ready: str | None) -> bool:
    try:
        if ready is not None:
            return httpx.get(f"http://127.0.0.1:{port}{ready}", timeout=2).status_code == 200
        socket.create_connection(("127.0.0.1", port), 1).close()
    except (OSError, httpx.HTTPError):
        return False
    return True


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        if process.poll() is not None or time.monotonic() > limit:
            raise RuntimeError(f"{process.args!r} did not become ready")
        time.sleep(0.05)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm-router", type=Path, metavar="PROGRAM", help="measure this peer as well")


if __name__ == "__main__":
    sys.exit(harness.main("router", run, _flags))
