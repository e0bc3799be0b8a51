"""A fake of everything the demo talks to: engines, agents and router behind one HTTP server.

A prompt's tokens are its words. What was sent before is "cached": in the engine until it is killed
or reset, in memory until that is cleared or everything goes down, on disk for ever.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvist_cli.demo import trace
from kvist_cli.local import Urls
from kvist_operator.spec import CacheCluster

CHUNK = 256
BLOCK = 32
ANSWER = ["So", " it", " is", "."]


@dataclass
class World:
    """State of the fakes, and what a test wants to go wrong."""

    base: str = ""
    cached: dict[str, set[tuple[int, ...]]] = field(
        default_factory=lambda: {"gpu": set(), "memory": set(), "disk": set()}
    )
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"gpu": 0, "memory": 0, "disk": 0})
    records: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    connector: bool = True
    wrong_tier: str = ""  # answers from there differ
    broken: bool = False  # the router answers 500
    ids: Iterator[int] = field(default_factory=count)
    chats: Iterator[int] = field(default_factory=lambda: count(1))
    served: int = 0
    asked: int = 0  # times that the router's replicas were looked at
    on_chat: Callable[[int], None] = lambda count: None
    writes_logs: bool = False

    def reuse(self, tokens: list[int]) -> dict[str, int]:
        """Tokens reused by tier, and remember the prompt."""
        hits = self._look(tokens)
        self.served += 1
        for tier, amount in hits.items():
            self.hit_tokens[tier] += amount
        blocks = {tuple(tokens[:n]) for n in range(BLOCK, len(tokens) + 1, BLOCK)}
        chunks = {prefix for prefix in blocks if len(prefix) % CHUNK == 0}
        self.cached["gpu"] |= blocks
        if self.connector:
            self.cached["memory"] |= chunks
            self.cached["disk"] |= chunks
        return hits

    def _look(self, tokens: list[int]) -> dict[str, int]:
        for tier in ("gpu", "memory", "disk"):
            step = BLOCK if tier == "gpu" else CHUNK
            lengths = range((len(tokens) - 1) // step * step, 0, -step)
            hit = next((n for n in lengths if tuple(tokens[:n]) in self.cached[tier]), 0)
            if hit:
                return {tier: hit}
        return {}


class Handler(BaseHTTPRequestHandler):
    world: World

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self.path.endswith("/v1/kvist/stats"):
            hits = {f"hit_tokens_{tier}": n for tier, n in self.world.hit_tokens.items()}
            stored = {"commits_accepted": len(self.world.cached["memory"]), "bytes_stored_disk": 7}
            counters = {"requests": self.world.served, **hits, **stored}
            self._json({"counters": counters, "chunk_bytes": 23040 * CHUNK})
        elif self.path.endswith("/v1/kvist/replicas"):
            self.world.asked += 1
            known = self.world.asked % 3 == 0  # a router that knows what replicas hold only after a while
            feed = {"engine_connected": known}
            replicas = [
                {"name": f"replica-{i}", "healthy": True, "mirrored": True, "feed": feed} for i in (0, 1)
            ]
            self._json({"replicas": replicas})
        else:
            record = self.world.records.get(self.path.rsplit("/", 1)[-1])
            self._json(record or {"actual": None})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", -1))
        text = self.rfile.read(max(length, 0))
        if len(text) != length:
            return  # the client was interrupted while it sent
        body = json.loads(text) if text else None
        self.world.log.append(self.path)
        routes: dict[str, Callable[[Any], None]] = {
            "chat/completions": self._chat,
            "v1/completions": self._complete,
            "tokenize": self._tokenize,
            "reset_prefix_cache": lambda _: self._forget("gpu"),
            "kvist/clear": lambda given: self._forget(given["tier"]),
            "kvist/flush": lambda _: self._json({"pending_chunks": 0, "pending_bytes": 0}),
        }
        next(answer for end, answer in routes.items() if self.path.endswith(end))(body)

    def _forget(self, tier: str) -> None:
        self.world.cached[tier].clear()
        self._json({"chunks": 0, "bytes": 0})

    def _tokenize(self, body: Any) -> None:
        self._json({"tokens": tokens_of(body.get("messages") or [{"content": body["prompt"]}])})

    def _chat(self, body: Any) -> None:
        if self.world.broken:
            self._json({"error": {"message": "out of order"}}, 500)
            return
        self.world.requests.append({**body, "asked": self.world.asked})
        self.world.on_chat(next(self.world.chats))  # each number once, whoever asks at the same time
        tokens = tokens_of(body["messages"])
        hits = self.world.reuse(tokens)
        number = str(next(self.world.ids))
        self.world.records[number] = {"actual": {"hit_tokens": hits, "load_seconds": 0.0}}
        self.send_response(200)
        self.send_header("x-kvist-request-id", number)
        self.send_header("x-kvist-replica", "replica-1")
        self.send_header("x-kvist-predicted-tokens", str(sum(hits.values())))
        self.end_headers()
        for piece in [*ANSWER[:-1], f" {number}."]:  # no answer is given twice
            self._event({"choices": [{"delta": {"content": piece}}]})
        details = {"cached_tokens": sum(hits.values())}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 4, "prompt_tokens_details": details}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _complete(self, body: Any) -> None:
        hits = self.world.reuse(body["prompt"])
        wrong = self.world.wrong_tier in hits
        logprobs = {"top_logprobs": [{"a": -0.25 if wrong else -0.125}]}
        usage = {"prompt_tokens_details": {"cached_tokens": sum(hits.values())}}
        self._json({"choices": [{"text": "a", "token_ids": [1], "logprobs": logprobs}], "usage": usage})

    def _event(self, data: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _json(self, data: Any, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())


def tokens_of(messages: list[dict[str, str]]) -> list[int]:
    return [zlib.crc32(word.encode()) for message in messages for word in message["content"].split()]


class FakeCluster:
    """What `Cluster.up` returns, as far as the demo uses it."""

    def __init__(self, world: World, manifest: CacheCluster) -> None:
        self.world, self.name = world, manifest.name
        world.connector = manifest.spec.cache.enabled and manifest.spec.cache.memory > 0
        for tier in ("gpu", "memory"):
            world.cached[tier].clear()
        agents = {"replica-0": f"{world.base}/agent-0"} if manifest.spec.cache.enabled else {}
        engines = {f"replica-{i}": f"{world.base}/engine-{i}" for i in range(2)}
        self.urls = Urls(f"{world.base}/router", f"{world.base}/admin", engines, agents)
        world.log.append(f"up {self.name}")

    def kill(self, program: str) -> int:
        self.world.log.append(f"kill {program}")
        self.world.cached["gpu"].clear()
        return 1

    def wait_ready(self, program: str, deadline: float = 0.0) -> float:
        return 1.5

    def down(self, *, flush: bool = True) -> None:
        self.world.log.append(f"down {self.name} flush={flush}")


@pytest.fixture
def world() -> Iterator[World]:
    state = World()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"world": state}))
    state.base = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture
def up(world: World) -> Callable[[CacheCluster, Path], FakeCluster]:
    def start(manifest: CacheCluster, folder: Path) -> FakeCluster:
        if world.writes_logs:
            (folder / "logs").mkdir(parents=True)
        return FakeCluster(world, manifest)

    return start


@pytest.fixture(scope="session")
def whole() -> trace.Trace:
    return trace.load()
