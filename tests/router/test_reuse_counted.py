"""What engines reused is counted by model, tenant and replica: requests, tokens and prefill seconds."""

from __future__ import annotations

import json

from prometheus_client.parser import text_string_to_metric_families

from kvist_connector.protocol.engine import EngineLoad, RequestRecord
from kvist_connector.protocol.feed import FEED_VERSION, Opening
from kvist_connector.protocol.tiers import Tier
from kvist_router.mind.interface import Decision, Metadata, Report
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.feed import FakeAgent

OPENING = Opening(
    version=FEED_VERSION, epoch=1, replica="r", fingerprint=b"f" * 32, group=0, model="m", chunk_tokens=256,
    block_tokens=32, gpu_known=False, draining=False,
)  # fmt: skip
BODY = json.dumps({"model": "m", "prompt": list(range(1000))}).encode()
NAMES = ("recorded_requests", "hit_requests", "recorded_prompt_tokens", "prefill_seconds", "saved_seconds")


def record(request: str, hits: dict[Tier, int]) -> RequestRecord:
    return RequestRecord(
        request=request, prompt_tokens=1000, last_chunk_key=b"",
        hit_tokens={int(tier): tokens for tier, tokens in hits.items()},
        arrived=0.0, lookup_seconds=0.0, wait_seconds=0.0, load_seconds=0.5, prefill_seconds=0.1,
    )  # fmt: skip


async def test_each_tenants_reuse_has_its_three_denominators(router, http, until) -> None:
    sent = [("red", {Tier.MEMORY: 512, Tier.DISK: 256}), ("red", {}), ("", {Tier.MEMORY: 100})]
    async with FakeEngine() as engine, FakeAgent(OPENING) as agent:
        running = await router(
            replicas=[{"name": "r", "url": engine.url, "agent": agent.url}], tenants=[{"name": "red"}]
        )
        agent.load(EngineLoad(prefill_seconds_per_token=0.01))
        await until(lambda: running.mind.replicas["r"].speeds.measured)
        for tenant, hits in sent:
            decision = await running.mind.decide(BODY, Metadata("completions", tenant))
            assert isinstance(decision, Decision)
            kept = running.mind.records.get(decision.id)
            agent.record(record(decision.id, hits))
            await until(lambda kept=kept: kept.actual is not None)
            await running.mind.report(decision.id, Report("ended"))
        async with http.get(running.admin_url + "/metrics") as answer:
            families = list(text_string_to_metric_families(await answer.text()))
    found = {
        (item.name, *(item.labels.get(label) for label in ("model", "tenant", "replica", "tier"))): item.value
        for family in families
        for item in family.samples
    }

    def counted(tenant: str) -> list[float]:
        return [round(found[f"kvist_router_{name}_total", "m", tenant, "r", None], 6) for name in NAMES]

    # Less than a chunk is no hit; what was loaded took half a second of what it saved.
    assert counted("red") == [2, 1, 2000, 20.0, 7.18]
    assert counted("other") == [1, 0, 1000, 10.0, 0.5]
    tokens = {key[2:]: value for key, value in found.items() if key[0] == "kvist_router_hit_tokens_total"}
    assert tokens == {
        ("red", "r", "memory"): 512,
        ("red", "r", "disk"): 256,
        ("other", "r", "memory"): 100,
    }
