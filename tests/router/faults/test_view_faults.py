"""What the router is told is wrong, too much, or changes all the time: it goes on serving, bounded."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from typing import Any

from prometheus_client import CollectorRegistry

from kvist_connector.keys import chunk_keys, root_key
from kvist_connector.protocol.engine import EngineLoad, RequestRecord
from kvist_connector.protocol.feed import FEED_VERSION, Opening, TierSpeed
from kvist_connector.protocol.tiers import Tier
from kvist_connector.settings import validate
from kvist_router.metrics import MindMetrics
from kvist_router.mind.interface import Decision, Metadata, Report
from kvist_router.mind.mind import LocalMind
from kvist_router.mind.models import ServedModel
from kvist_router.mind.policies import policy
from kvist_router.mind.prompts import PromptSource
from kvist_router.mind.replica import Replica
from kvist_router.settings import RouterSettings
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.faults import ask, page
from kvist_router.testing.feed import FakeAgent
from kvist_router.testing.kubernetes import FakeKubernetes
from kvist_router.tokens.remote import RemoteTokenizer

FINGERPRINT = b"f" * 32
TOKENS = list(range(1000, 1000 + 8 * 256))
KEYS = chunk_keys(root_key(FINGERPRINT), TOKENS)
BODY = json.dumps({"model": "m", "prompt": TOKENS}).encode()
COMPLETIONS = Metadata("completions")
PATH = "/v1/completions"


def opening(name: str) -> Opening:
    return Opening(
        version=FEED_VERSION,
        epoch=1,
        replica=name,
        fingerprint=FINGERPRINT,
        group=0,
        model="m",
        chunk_tokens=256,
        block_tokens=32,
        gpu_known=True,
        draining=False,
    )


async def test_a_feed_that_claims_everything_gets_no_more_than_its_share(router, http, at_rest) -> None:
    """Its work that is not done speaks against it, whatever it says of its cache and its load."""
    liar, honest = (
        FakeAgent(opening("liar"), {Tier.MEMORY: KEYS, Tier.GPU: KEYS}),
        FakeAgent(opening("honest")),
    )
    liar.speeds = (TierSpeed(Tier.MEMORY, 0.0, 1e18),)
    async with FakeEngine() as slow, FakeEngine() as well, liar, honest:
        slow.first_byte.clear()  # it computes what it said it had
        running = await router(
            replicas=[
                {"name": "liar", "url": slow.url, "agent": liar.url},
                {"name": "honest", "url": well.url, "agent": honest.url},
            ],
            index={"max_keys": 1024},
        )
        decided = [await running.mind.decide(BODY, COMPLETIONS) for _ in range(200)]
        chosen = [item.replica for item in decided if isinstance(item, Decision)]
        assert len(chosen) == 200
        assert chosen.count("honest") > 0  # what waits at the liar is the router's own count
        for item in decided:
            assert isinstance(item, Decision)
            await running.mind.report(item.id, Report("cancelled"))
        liar.delta(Tier.MEMORY, [os.urandom(16) for _ in range(5000)])
        mirror = running.mind.replicas["liar"].mirror
        async with asyncio.timeout(60):
            while not mirror.overflow:  # noqa: ASYNC110 - the mirror has no event
                await asyncio.sleep(0.005)
        assert len(mirror) == 1024
        await at_rest(running)


async def test_a_flood_of_news_holds_up_no_request_and_is_bounded(router, http, until, at_rest) -> None:
    agent = FakeAgent(opening("r"))
    draw = random.Random(3)
    async with FakeEngine() as engine, agent:
        running = await router(
            replicas=[{"name": "r", "url": engine.url, "agent": agent.url}], index={"max_keys": 2048}
        )
        served = 0
        for _ in range(20):
            for _ in range(40):
                agent.delta(Tier.MEMORY, [draw.randbytes(16) for _ in range(64)], [draw.randbytes(16)])
                agent.load(EngineLoad(waiting_requests=draw.randrange(99)))
                agent.record(record(draw))
            status, _, whole = await ask(http, running.url, PATH, data=BODY)
            served += status == 200 and whole
        assert served == 20
        mirror = running.mind.replicas["r"].mirror
        await until(lambda: mirror.overflow > 0)
        assert len(mirror) <= 2048
        assert len(running.mind.records) == 20  # records of requests that were never ours are not kept
        await at_rest(running)
        assert await page(http, running.url, "/readyz") == 200


def record(draw: random.Random) -> RequestRecord:
    return RequestRecord(
        request=draw.randbytes(16).hex(),
        prompt_tokens=99,
        last_chunk_key=b"",
        hit_tokens={},
        arrived=0.0,
        lookup_seconds=0.0,
        wait_seconds=0.0,
        load_seconds=0.0,
        prefill_seconds=0.0,
    )


def listed(name: str, url: str) -> dict[str, Any]:
    """An EndpointSlice with one engine."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "pool"}},
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": ["127.0.0.1"],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "targetRef": {"kind": "Pod", "name": name},
            }
        ],
        "ports": [{"name": "engine", "port": int(url.rpartition(":")[2])}],
    }


async def test_discovery_that_flaps_breaks_no_stream_and_leaves_no_task(router, http, until, at_rest) -> None:
    async with FakeEngine() as first, FakeEngine() as second, FakeKubernetes() as kubernetes:
        both = [listed("one", first.url), listed("two", second.url)]
        for item in both:
            await kubernetes.put("ns", item)
        running = await router(
            kubernetes={
                "service": "pool",
                "namespace": "ns",
                "server": kubernetes.url,
                "token_file": None,
                "ca_file": None,
            },
        )
        await until(lambda: len(running.mind.replicas) == 2)
        await until(lambda: all(item.healthy for item in running.mind.replicas.values()))
        followed = _following()
        first.rest.clear()
        second.rest.clear()
        stream = await http.post(running.url + PATH, json={"model": "m", "prompt": "x", "stream": True})
        begun = await stream.content.readany()
        for turn in range(5):
            gone = both[turn % 2]
            await kubernetes.drop("ns", gone["metadata"]["name"])
            await until(lambda: len(running.mind.replicas) == 1)
            await kubernetes.put("ns", gone)
            await until(lambda: len(running.mind.replicas) == 2)
        first.rest.set()
        second.rest.set()
        assert begun + await stream.read() == b"".join(first.pieces)
        await until(lambda: all(item.healthy for item in running.mind.replicas.values()))
        await at_rest(running)
        assert _following() == followed
        assert (await ask(http, running.url, PATH, data=BODY))[0] == 200


def _following() -> int:
    """Tasks that follow something: replicas, feeds, discovery."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return names.count("supervised")


class Clock:
    """Seconds that jump when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Never:
    """A session that nobody may use."""


async def test_clocks_that_jump_end_no_count_below_zero(monkeypatch) -> None:
    clock = Clock()
    settings = validate(RouterSettings, {"replicas": [{"name": "r", "url": "http://127.0.0.1:9"}]})
    metrics = MindMetrics(CollectorRegistry())
    source = PromptSource(None, RemoteTokenizer(_Never(), 1.0), metrics, verify=False)  # type: ignore[arg-type]
    mind = LocalMind(settings, policy("kvist"), source, metrics, clock=clock)
    replica = Replica(settings.replicas[0], settings.index)
    replica.healthy, replica.models = True, {"m": ServedModel("m", 131072, False)}
    mind.replicas["r"] = replica
    for jump, wall in ((0.0, 0.0), (86_400.0, -86_400.0), (1e9, 1e9), (0.0, -1e9)):
        decisions: list[Any] = [await mind.decide(BODY, COMPLETIONS) for _ in range(5)]
        assert all(isinstance(item, Decision) for item in decisions)
        clock.now += jump
        monkeypatch.setattr(time, "time", lambda wall=wall: 1e9 + wall)
        mind.tick()
        for item in decisions:
            await mind.report(item.id, Report("first_byte"))
            await mind.report(item.id, Report("ended", tokens=3))
        assert len(mind.in_flight) == 0
        assert (replica.outstanding_requests, replica.outstanding_tokens, replica.outstanding_prefills) == (
            0,
            0,
            0,
        )
        assert len(replica.pending) == 0
        assert replica.speeds.correction < 100  # a jump teaches nothing that stays absurd
