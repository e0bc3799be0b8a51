"""Minutes of traffic while programs are killed: service comes back, nothing leaks, no token is wrong."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import httpx
import pytest

from kvist_connector import names

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

SOAK_SECONDS = 300
SESSIONS = 4
# An engine that is killed takes a minute to come back; agents and the router are killed more often.
VICTIMS = ("agent-0", "agent-1", "router", "agent-0", "agent-1", "router", "engine-0")
# Two chunks and less than a block: a load and the engine's own hit reuse the same 512 tokens.
EXACT_TOKENS = 2 * 256 + 20


def test_traffic_survives_kills_without_a_wrong_token(rig: Any) -> None:
    draw = random.Random(7)
    stop = threading.Event()
    seen: list[int] = []
    passengers = [
        threading.Thread(target=_talk, args=(rig, number, stop, seen), daemon=True)
        for number in range(SESSIONS)
    ]
    for passenger in passengers:
        passenger.start()
    ends = time.monotonic() + SOAK_SECONDS
    round_number = 0
    try:
        while time.monotonic() < ends:
            victim = VICTIMS[round_number % len(VICTIMS)]
            round_number += 1
            stop.wait(draw.uniform(2, 6))  # somewhere inside loads, stores and streams
            rig.cluster.kill(victim)
            rig.cluster.wait_ready(victim)
    finally:
        stop.set()
        for passenger in passengers:
            passenger.join(180)
    rig.mirrored()
    rig.at_rest()
    assert not any(passenger.is_alive() for passenger in passengers)
    assert seen.count(200) > 10
    assert set(seen) <= {200, 502, 503, 0}  # refused or broken off in words while a program was away
    for replica in rig.urls.engines:
        _tiers_agree(rig, replica, draw)
        slots = rig.stats(replica)["slots"]
        assert slots["quarantine"] == 0
        assert rig.stats(replica)["leases"] <= max(1, sum(slots.values()) // 8)  # only fresh chunks


def _talk(rig: Any, number: int, stop: threading.Event, seen: list[int]) -> None:
    turn = 0
    while not stop.is_set():
        turn += 1
        try:
            answer = rig.chat(f"session {number}", sentences=30 + turn % 40, max_tokens=16)
            seen.append(answer.status_code)
        except httpx.HTTPError:
            seen.append(0)
            stop.wait(0.5)


def _tiers_agree(rig: Any, replica: str, draw: random.Random) -> None:
    """Loaded from memory, from disk, and from the engine's own cache: the same answer to the bit."""
    prompt = [draw.randrange(100, 40_000) for _ in range(EXACT_TOKENS)]
    agent = rig.urls.agents[replica]
    _complete(rig, replica, prompt)
    local = _complete(rig, replica, prompt)
    rig.forget_gpu(replica)
    memory = _complete(rig, replica, prompt)
    rig.post(agent + names.PATH_FLUSH, {"deadline": 60})
    rig.post(agent + names.PATH_CLEAR, {"tier": "memory"})
    rig.forget_gpu(replica)
    disk = _complete(rig, replica, prompt)
    assert memory == local
    assert disk == local


def _complete(rig: Any, replica: str, prompt: list[int]) -> Any:
    body = {"model": "smol", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 5}
    answer = rig.client.post(f"{rig.urls.engines[replica]}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"], choice["logprobs"]
