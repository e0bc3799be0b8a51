"""Nothing piles up and nothing blocks: maps stay bounded over many requests, metrics do not stall streams."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp

from kvist_router.mind.interface import Metadata, Report
from kvist_router.testing.engine import FakeEngine

HANG_SECONDS = 60.0  # only a hang takes longer


def body(seed: int, tokens: int = 600) -> bytes:
    draw = random.Random(seed)
    return json.dumps({"model": "m", "prompt": [draw.randrange(9999) for _ in range(tokens)]}).encode()


async def test_every_map_is_bounded_whatever_way_requests_end(router) -> None:
    async with FakeEngine() as engine:
        running = await router(
            replicas=[{"name": "r", "url": engine.url}],
            records=50,
            index={"unmanaged_kv_tokens": 256 * 40},
            tokens={"key_cache_chunks": 64},
        )
        mind = running.mind
        ends: list[Any] = ["ended", "cancelled", "failed"]
        for number in range(600):
            decision = await mind.decide(body(number), Metadata("completions"))
            if number % 2:
                await mind.report(decision.id, Report("first_byte"))
            await mind.report(decision.id, Report(ends[number % 3]))
            await mind.report(decision.id, Report(ends[number % 3]))  # a second end changes nothing
        replica = mind.replicas["r"]
        assert len(mind.records) == 50
        assert len(mind.in_flight) == 0
        assert len(replica.approximate) == 40
        assert len(replica.pending) == 0
        assert (replica.outstanding_tokens, replica.outstanding_requests) == (0, 0)


async def test_above_the_limit_of_requests_in_flight_new_ones_get_503(router) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], limits={"in_flight": 2})
        for number in range(2):
            await running.mind.decide(body(number), Metadata("completions"))
        refusal = await running.mind.decide(body(3), Metadata("completions"))
        assert (refusal.status, refusal.code) == (503, "overloaded")


async def turns(stop: asyncio.Event) -> int:
    """How often the loop came round: it does only while no handler blocks it."""
    count = 0
    while not stop.is_set():
        await asyncio.sleep(0)
        count += 1
    return count


async def test_requests_are_served_while_a_scrape_is_read(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"name": "r", "url": engine.url}])
        for number in range(1500):
            decision = await running.mind.decide(body(number, 300), Metadata("completions"))
            await running.mind.report(decision.id, Report("ended"))
        stop = asyncio.Event()
        watch = asyncio.create_task(turns(stop))
        for path in ("/metrics", "/v1/kvist/decisions?limit=1000", "/v1/kvist/replicas"):
            async with asyncio.timeout(HANG_SECONDS):
                scrape = asyncio.create_task(_read(http, running.admin_url + path))
                decision = await running.mind.decide(body(1, 300), Metadata("completions"))
                await running.mind.report(decision.id, Report("ended"))
                assert await scrape
        stop.set()
        assert await watch > 3  # a scrape that held the loop would leave it one turn each


async def _read(http: aiohttp.ClientSession, url: str) -> bytes:
    async with http.get(url) as answer:
        assert answer.status == 200
        return await answer.read()
