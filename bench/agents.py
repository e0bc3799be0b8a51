"""Sessions of coding and web agents through two real engines: what routing and caching give together.

    python -m bench.agents --trace miniswe_text.jsonl.gz --trace magagent_text.jsonl.gz [--pieces FOLDER]

Three forms of the same two engines: plain vLLM behind round robin, with connector behind round robin, Kvist.
Lines of a trace are {"timestamp": us, "session_id", "input", "output"}, one request each, plain or gzip.
They are made smaller to fit the machine, and keep their shape: see `smaller`. Each form is kept in
`--pieces`: what is there is done.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from bench import harness
from bench.prompts import model_folder
from kvist_cli.demo import sources
from kvist_cli.demo.entry import free_ports
from kvist_cli.local import Cluster, Options
from kvist_connector import names
from kvist_operator import spec

BLOCK = 1024  # characters of a trace's prompt that are made smaller together
SCALE = 0.25
MOST_CHARACTERS = 7000
OUTPUT_TOKENS = 8
SESSIONS, TURNS = 5, 6  # of every trace
AT_A_TIME = 4
SERVED = "agents"
KV_SPACE, MAX_MODEL_LEN = "80Mi", 3072
DEADLINE_SECONDS = 300.0
CACHES: dict[str, dict[str, Any]] = {
    "none": {"enabled": False},
    "tiers": {"memory": "1Gi", "disk": {"size": "4Gi"}},
}
FORMS = {
    "round robin, no connector": ("none", "round-robin"),
    "round robin, connector": ("tiers", "round-robin"),
    "Kvist": ("tiers", "kvist"),
}
ABSENT = (
    "agent traces, which are not in this repository: miniswe_text.jsonl.gz and magagent_text.jsonl.gz of "
    "LMCache/lmcache-agent-trace, by --trace FILE for each"
)


@dataclass(frozen=True)
class Session:
    """Prompts of one agent, in their order; `begin` is when it began, of its trace."""

    trace: str
    begin: int
    prompts: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What one request took."""

    seconds_to_first: float
    prompt_tokens: int
    hits: dict[str, int]  # by tier


@dataclass(frozen=True)
class Played:
    """One form."""

    name: str
    seconds: float
    start_seconds: float
    answers: tuple[Answer, ...]

    def share(self, tier: str = "") -> float:
        """Prompt tokens reused of all: from a tier, or from any."""
        found = sum(sum(v for k, v in item.hits.items() if not tier or k == tier) for item in self.answers)
        return found / sum(item.prompt_tokens for item in self.answers)

    def first(self, share: float) -> float:
        """Percentile of TTFT."""
        return harness.percentile([item.seconds_to_first for item in self.answers], share)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.answers) / self.seconds


# ---- the trace


def smaller(text: str) -> str:
    """The first SCALE of every block of characters: prompts that begin alike still do, for the same share."""
    kept = "".join(text[begin : begin + round(BLOCK * SCALE)] for begin in range(0, len(text), BLOCK))
    return kept[:MOST_CHARACTERS]


def read(path: Path, sessions: int, turns: int) -> list[Session]:
    """The first sessions of a trace, the first requests of each."""
    found: dict[str, list[dict[str, Any]]] = {}
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            item = json.loads(line)
            if item["input"]:
                found.setdefault(item["session_id"], []).append(item)
    chosen = list(found.values())[:sessions]
    return [
        Session(path.name, items[0]["timestamp"], tuple(smaller(item["input"]) for item in items[:turns]))
        for items in chosen
    ]


# ---- the engines


@contextmanager
def cluster(form: str, folder: Path) -> Iterator[Cluster]:
    """Two engines, and what the form puts around them."""
    cache, policy = FORMS[form]
    manifest = spec.parse(
        {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": "bench-agents"},
            "spec": {
                "model": {"name": str(model_folder()), "servedName": SERVED},
                "engine": {
                    "replicas": 2,
                    "dtype": "bfloat16",
                    "maxModelLen": MAX_MODEL_LEN,
                    "kvCacheMemory": KV_SPACE,
                    "extraArgs": ["--enable-prompt-tokens-details"],
                },
                "cache": CACHES[cache],
                "router": {"policy": policy},
            },
        }
    )
    up = Cluster.up(manifest, Options(run_dir=folder, ports=free_ports()), lambda event: None)
    try:
        yield up
    finally:
        up.down(flush=False)


def play(form: str, sessions: Sequence[Session], folder: Path) -> Played:
    """All sessions; within one each request follows the answer to the last."""
    began = time.monotonic()
    with cluster(form, folder) as up, httpx.Client(timeout=httpx.Timeout(DEADLINE_SECONDS)) as client:
        sources.wait_routable(client, up.urls.router_admin, up.urls.engines, mirrored=bool(up.urls.agents))
        for engine in up.urls.engines.values():
            _complete(client, engine, "Hello")
        started = time.monotonic()

        def run(session: Session) -> list[_Heard]:
            return [_complete(client, up.urls.router, prompt) for prompt in session.prompts]

        with ThreadPoolExecutor(AT_A_TIME) as agents:
            heard = [item for found in agents.map(run, sessions) for item in found]
        seconds = time.monotonic() - started
        answers = tuple(_joined(client, up, item) for item in heard)
    return Played(form, seconds, started - began, answers)


class _Heard(NamedTuple):
    """What a client saw of an answer."""

    seconds_to_first: float
    usage: dict[str, Any]
    request: str  # the router's name of it


def _joined(client: httpx.Client, up: Cluster, heard: _Heard) -> Answer:
    """With what the engine told the router of it, where it does."""
    cached = (heard.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    told = sources.outcome(client, up.urls.router_admin, heard.request) if up.urls.agents else None
    hits = {"gpu": cached} if told is None else dict(told.hits)
    return Answer(heard.seconds_to_first, heard.usage["prompt_tokens"], hits)


def _complete(client: httpx.Client, base: str, prompt: str) -> _Heard:
    body = {
        "model": SERVED, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    sent, first = time.monotonic(), 0.0
    usage: dict[str, Any] = {}
    with client.stream("POST", f"{base}/v1/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"{base} answered {answer.status_code}: {answer.read()[:300]!r}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic() - sent
                usage = json.loads(line[6:]).get("usage") or usage
    return _Heard(first, usage, answer.headers.get(names.HEADER_REQUEST_ID, ""))


# ---- the result


def run(options: harness.Options) -> harness.Result:
    """The same sessions in three forms, one after the other, each on engines of its own."""
    traces: list[Path] = options.extra.trace
    if not traces:
        return harness.Result(headline=f"not measured: {ABSENT}", absent=(ABSENT,))
    sessions = [
        session
        for path in traces
        for session in read(path, 2 if options.quick else SESSIONS, 3 if options.quick else TURNS)
    ]
    sessions.sort(key=lambda session: (session.begin, session.trace))
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        pieces = options.extra.pieces or Path(folder)
        pieces.mkdir(parents=True, exist_ok=True)
        played = [
            _kept(pieces / f"{number}.json", form, sessions, Path(folder) / f"run{number}")
            for number, form in enumerate(FORMS)
        ]
    return _result(played, sessions)


def _kept(piece: Path, form: str, sessions: Sequence[Session], folder: Path) -> Played:
    if not piece.exists():
        print(f"--- {form}", flush=True)
        piece.write_bytes(msgspec.json.encode(play(form, sessions, folder)))
    return msgspec.json.decode(piece.read_bytes(), type=Played)


def _result(played: Sequence[Played], sessions: Sequence[Session]) -> harness.Result:
    plain, ours = played[0], played[-1]
    requests = len(ours.answers)
    table = harness.Table(
        f"{len(sessions)} sessions, {requests} requests, {AT_A_TIME} sessions at a time",
        ("form", "seconds", "req/s", "TTFT mean s", "p50", "p99", "hit, of tokens", "GPU", "other tiers"),
        tuple(_row(item) for item in played),
        f"A prompt has {sum(a.prompt_tokens for a in ours.answers) / requests:.0f} tokens on average, an "
        f"answer {OUTPUT_TOKENS}. Made smaller: {SCALE:.0%} of every {BLOCK} characters of a prompt, at most "
        f"{MOST_CHARACTERS} in all, the first requests of the first sessions.",
    )
    return harness.Result(
        headline=f"Kvist {ours.rate / plain.rate:.2f}x the requests per second of round robin without "
        f"connector, TTFT {_mean(plain) / _mean(ours):.2f}x lower",
        tables=(table,),
        figures={
            item.name: {"seconds": item.seconds, "ttft_mean_s": _mean(item), "hit": item.share(),
                        "start_s": item.start_seconds}
            for item in played
        },
    )  # fmt: skip


def _mean(played: Played) -> float:
    return sum(item.seconds_to_first for item in played.answers) / len(played.answers)


def _row(played: Played) -> tuple[str, ...]:
    gpu, every = played.share("gpu"), played.share()
    times = (_mean(played), played.first(0.5), played.first(0.99))
    shares = (every, gpu, every - gpu)
    return (
        played.name, f"{played.seconds:.0f}", f"{played.rate:.2f}",
        *(f"{value:.2f}" for value in times), *(f"{value:.1%}" for value in shares),
    )  # fmt: skip


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE",
                        help="a trace of agents; may be given again")  # fmt: skip
    parser.add_argument("--pieces", type=Path, metavar="FOLDER", help="keep each form, go on from there")


if __name__ == "__main__":
    sys.exit(harness.main("agents", run, _flags))
