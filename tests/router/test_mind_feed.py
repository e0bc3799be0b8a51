"""The mirror of replicas: what the feed says decides, and every break of it brings a new snapshot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from kvist_cli.app import app
from kvist_connector.keys import chunk_keys, root_key, tail_keys
from kvist_connector.planner import PrefillModel
from kvist_connector.protocol.engine import EngineLoad, RequestRecord
from kvist_connector.protocol.feed import FEED_VERSION, Opening, TierSpeed
from kvist_connector.protocol.tiers import Tier
from kvist_router.app import Running
from kvist_router.mind.cost import Speeds
from kvist_router.mind.interface import Decision, Metadata, Report
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.feed import FakeAgent

FINGERPRINT = b"f" * 32
COMPLETIONS = Metadata("completions")
TOKENS = list(range(1000, 1000 + 4 * 256 + 100))
ROOT = root_key(FINGERPRINT)
KEYS = chunk_keys(ROOT, TOKENS)


def opening(epoch: int = 1, gpu_known: bool = False, fingerprint: bytes = FINGERPRINT) -> Opening:
    return Opening(
        version=FEED_VERSION,
        epoch=epoch,
        replica="r",
        fingerprint=fingerprint,
        group=0,
        model="m",
        chunk_tokens=256,
        block_tokens=32,
        gpu_known=gpu_known,
        draining=False,
    )


def body(tokens: list[int] = TOKENS, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": tokens, **fields}).encode()


class Cluster:
    """Engines with agents behind one router."""

    def __init__(self, running: Running, agents: list[FakeAgent], engines: list[FakeEngine]) -> None:
        self.running, self.mind = running, running.mind
        self.agents, self.engines = agents, engines

    async def decide(self, **fields: Any) -> Decision:
        """A decision whose request then ends, so that it leaves no load behind."""
        decision = await self.mind.decide(body(**fields), COMPLETIONS)
        assert isinstance(decision, Decision)
        await self.mind.report(decision.id, Report("cancelled"))
        return decision


@pytest.fixture
async def cluster(router):
    async with AsyncExitStack() as stack:

        async def start(*agents: FakeAgent, **values: Any) -> Cluster:
            engines = [await stack.enter_async_context(FakeEngine()) for _ in agents]
            for agent in agents:
                await stack.enter_async_context(agent)
            listed = [
                {"name": f"r{number}", "url": engine.url, "agent": agent.url}
                for number, (engine, agent) in enumerate(zip(engines, agents, strict=True))
            ]
            return Cluster(await router(replicas=listed, **values), list(agents), engines)

        yield start


async def test_the_replica_that_holds_most_is_taken_and_its_hit_predicted(cluster) -> None:
    small, large = (
        FakeAgent(opening(), {Tier.MEMORY: KEYS[:1]}),
        FakeAgent(opening(), {Tier.MEMORY: KEYS[:3]}),
    )
    started = await cluster(small, large)
    decision = await started.decide()
    assert (decision.replica, decision.predicted_tokens) == ("r1", 3 * 256)
    record = started.mind.records.get(decision.id)
    assert record is not None
    assert {item.replica: item.reused_tokens for item in record.considered} == {"r0": 256, "r1": 768}
    assert record.considered[0].total > record.considered[1].total


async def test_a_hole_in_the_chain_ends_the_hit(cluster) -> None:
    started = await cluster(FakeAgent(opening(), {Tier.MEMORY: [KEYS[0], KEYS[2], KEYS[3]]}))
    assert (await started.decide()).predicted_tokens == 256


async def test_at_least_the_last_block_is_computed(cluster) -> None:
    started = await cluster(FakeAgent(opening(), {Tier.MEMORY: KEYS}))
    whole = TOKENS[: 4 * 256]
    assert (await started.decide(tokens=whole)).predicted_tokens == 4 * 256 - 32


async def test_gpu_hits_reach_into_a_chunk_and_need_every_block_before(cluster) -> None:
    tail = tail_keys(KEYS[0], TOKENS[256:512], 32)
    agent = FakeAgent(opening(gpu_known=True), {Tier.GPU: [KEYS[0], *tail[:3], tail[4]], Tier.MEMORY: []})
    started = await cluster(agent)
    assert (await started.decide()).predicted_tokens == 256 + 3 * 32


async def test_an_unknown_gpu_view_is_emptied(cluster, until) -> None:
    agent = FakeAgent(opening(gpu_known=True), {Tier.GPU: KEYS[:2], Tier.MEMORY: KEYS[:1]})
    started = await cluster(agent)
    assert (await started.decide()).predicted_tokens == 512
    agent.state(gpu_known=False, draining=False)
    await until(lambda: not started.mind.replicas["r0"].mirror.gpu_known)
    assert (await started.decide()).predicted_tokens == 256


async def test_where_the_gpu_is_unknown_the_own_dispatches_stand_in(cluster) -> None:
    started = await cluster(FakeAgent(opening(), {Tier.MEMORY: KEYS[:1]}), FakeAgent(opening()))
    sent = await started.mind.decide(body(TOKENS[:600]), COMPLETIONS)
    await started.mind.report(sent.id, Report("first_byte"))
    await started.mind.report(sent.id, Report("ended"))
    decision = await started.decide()
    assert (decision.replica, decision.predicted_tokens) == (sent.replica, 512)


async def test_deltas_add_and_remove(cluster, until) -> None:
    agent = FakeAgent(opening(), {Tier.MEMORY: KEYS[:2]})
    started = await cluster(agent)
    mirror = started.mind.replicas["r0"].mirror
    agent.delta(Tier.DISK, KEYS[:1])
    agent.delta(Tier.MEMORY, KEYS[2:3], removed=KEYS[:1])
    await until(lambda: mirror.has(KEYS[2]))
    assert (await started.decide()).predicted_tokens == 768  # the first chunk is on disk still
    agent.delta(Tier.DISK, [], removed=KEYS[:1])
    await until(lambda: not mirror.has(KEYS[0]))
    assert (await started.decide()).predicted_tokens == 0


def gap(agent: FakeAgent) -> None:
    agent.skip()
    agent.delta(Tier.MEMORY, KEYS[3:4])


def garbage(agent: FakeAgent) -> None:
    agent.raw(b"\x05\x00\x00\x00notit")


def oversized(agent: FakeAgent) -> None:
    agent.raw(b"\xff\xff\xff\xff")


def broken_key(agent: FakeAgent) -> None:
    agent.delta(Tier.MEMORY, [b"short"])


def unknown_tier(agent: FakeAgent) -> None:
    agent.delta(99, KEYS[:1])


def ended(agent: FakeAgent) -> None:
    agent.end()


@pytest.mark.parametrize("fault", [gap, garbage, oversized, broken_key, unknown_tier, ended])
async def test_whatever_breaks_the_feed_brings_a_new_snapshot(
    cluster, until, http, fault: Callable[[FakeAgent], None]
) -> None:
    agent = FakeAgent(opening(), {Tier.MEMORY: KEYS[:1]})
    started = await cluster(agent)
    agent.snapshot = {Tier.MEMORY: KEYS[:2]}
    agent.opening = opening(epoch=2)
    fault(agent)
    replica = started.mind.replicas["r0"]
    await until(lambda: agent.connections == 2 and replica.mirror.complete and replica.mirror.has(KEYS[1]))
    assert (await started.decide()).predicted_tokens == 512
    assert replica.feed_breaks == 1
    async with http.get(started.running.admin_url + "/metrics") as answer:
        assert 'kvist_router_feed_breaks_total{replica="r0"} 1.0' in await answer.text()


async def test_a_lost_feed_is_believed_for_a_while_then_the_own_history_counts(cluster, until) -> None:
    agent = FakeAgent(opening(), {Tier.MEMORY: KEYS})
    started = await cluster(agent, index={"stale_seconds": 0.0})
    decision = await started.mind.decide(body(TOKENS[:600]), COMPLETIONS)
    await started.mind.report(decision.id, Report("first_byte"))
    await started.mind.report(decision.id, Report("ended"))
    await agent.stop()
    await until(lambda: not started.mind.replicas["r0"].feed_live)
    assert (await started.decide()).predicted_tokens == 512  # the two chunks that were sent there


async def test_a_draining_replica_gets_nothing_new(cluster, until) -> None:
    agents = [FakeAgent(opening(), {Tier.MEMORY: KEYS}), FakeAgent(opening())]
    started = await cluster(*agents)
    agents[0].state(gpu_known=False, draining=True)
    await until(lambda: started.mind.replicas["r0"].draining)
    assert (await started.decide()).replica == "r1"


async def test_salt_and_fingerprint_are_part_of_the_keys(cluster) -> None:
    other = FakeAgent(opening(fingerprint=b"g" * 32), {Tier.MEMORY: KEYS})
    started = await cluster(FakeAgent(opening(), {Tier.MEMORY: KEYS}), other)
    assert (await started.decide()).replica == "r0"
    assert (await started.decide(cache_salt="tenant")).predicted_tokens == 0


async def test_a_follower_goes_where_its_prefix_is_being_computed(cluster, until) -> None:
    started = await cluster(FakeAgent(opening()), FakeAgent(opening()))
    leader = await started.mind.decide(body(), COMPLETIONS)
    stranger = await started.mind.decide(body(TOKENS[::-1]), COMPLETIONS)
    assert stranger.replica != leader.replica  # both replicas are equally busy now
    follower = await started.mind.decide(body(), COMPLETIONS)
    assert follower.replica == leader.replica
    assert follower.predicted_tokens == 4 * 256
    replica = started.mind.replicas[leader.replica]
    assert len(replica.pending) == 4
    started.agents[int(leader.replica[1])].delta(Tier.MEMORY, KEYS)
    await until(lambda: len(replica.pending) == 0)


async def test_a_leader_that_fails_takes_its_pending_prefix_with_it(cluster) -> None:
    started = await cluster(FakeAgent(opening()), FakeAgent(opening()))
    leader = await started.mind.decide(body(), COMPLETIONS)
    await started.mind.report(leader.id, Report("failed", "reset"))
    assert (await started.decide()).predicted_tokens == 0


async def test_the_engines_load_moves_requests_away(cluster, until) -> None:
    agents = [FakeAgent(opening(), {Tier.MEMORY: KEYS[:1]}), FakeAgent(opening())]
    started = await cluster(*agents)
    assert (await started.decide()).replica == "r0"
    agents[0].load(EngineLoad(waiting_prefill_tokens=50_000, prefill_seconds_per_token=1e-3))
    await until(lambda: started.mind.replicas["r0"].load.waiting_prefill_tokens > 0)
    assert (await started.decide()).replica == "r1"


def record(request: str, prompt: int, last: bytes, **hits: int) -> RequestRecord:
    return RequestRecord(
        request=request,
        prompt_tokens=prompt,
        last_chunk_key=last,
        hit_tokens={int(Tier[tier.upper()]): tokens for tier, tokens in hits.items()},
        arrived=0.0,
        lookup_seconds=0.001,
        wait_seconds=0.002,
        load_seconds=0.003,
        prefill_seconds=0.5,
    )


async def test_predictions_are_joined_with_what_happened(cluster, until, http) -> None:
    agent = FakeAgent(opening(), {Tier.MEMORY: KEYS[:3]})
    started = await cluster(agent)
    decision = await started.decide()
    agent.record(record(decision.id, len(TOKENS), KEYS[-1], memory=768))
    kept = started.mind.records.get(decision.id)
    await until(lambda: kept.actual is not None)
    async with http.get(f"{started.running.admin_url}/v1/kvist/decisions/{decision.id}") as answer:
        found = await answer.json()
    assert found["predicted_tokens"] == 768
    assert found["actual"]["hit_tokens"] == {"memory": 768}
    async with http.get(f"{started.running.admin_url}/v1/kvist/decisions?limit=1") as answer:
        assert [item["id"] for item in (await answer.json())["decisions"]] == [decision.id]
    async with http.get(f"{started.running.admin_url}/metrics") as answer:
        text = await answer.text()
    whose = 'model="m",replica="r0",tenant="other"'
    assert f"kvist_router_hit_requests_total{{{whose}}} 1.0" in text
    assert f'kvist_router_hit_tokens_total{{{whose},tier="memory"}} 768.0' in text
    # A chunk of the feed's prior size: 8 MiB for 256 tokens.
    assert f'kvist_router_hit_bytes_total{{{whose},tier="memory"}} 2.5165824e+07' in text
    async with http.get(f"{started.running.admin_url}/v1/kvist/replicas") as answer:
        assert (await answer.json())["replicas"][0]["feed"]["keys"] == 3
    async with http.get(f"{started.running.admin_url}/v1/kvist/decisions/nobody") as answer:
        assert answer.status == 404


async def test_savings_count_once_the_engines_speed_is_measured(cluster, until) -> None:
    agent = FakeAgent(opening(), {Tier.MEMORY: KEYS[:3]})
    started = await cluster(agent)
    replica, admin = started.mind.replicas["r0"], started.running.admin_url

    async def said_after_a_request() -> str:
        decision = await started.decide()
        agent.record(record(decision.id, len(TOKENS), KEYS[-1], memory=768))
        await until(lambda: started.mind.records.get(decision.id).actual is not None)
        return (await asyncio.to_thread(CliRunner().invoke, app, ["status", "--router", admin])).output

    assert "prefill saved is not measured yet" in await said_after_a_request()
    agent.load(EngineLoad(prefill_seconds_per_token=0.01))
    await until(lambda: replica.speeds.measured)
    assert "7.7 s of prefill saved (estimated)" in await said_after_a_request()


async def test_a_prefill_is_over_when_the_engine_says_so_not_when_the_whole_answer_is_there(
    cluster, until
) -> None:
    agent = FakeAgent(opening())
    started = await cluster(agent)
    replica = started.mind.replicas["r0"]
    sent = await started.mind.decide(body(), COMPLETIONS)
    assert (replica.outstanding_tokens, replica.outstanding_prefills) == (len(TOKENS), 1)
    agent.record(record(sent.id, len(TOKENS), KEYS[-1]))
    await until(lambda: replica.outstanding_prefills == 0)
    assert (replica.outstanding_tokens, replica.outstanding_requests) == (0, 1)
    replica.held_seconds = 0.0
    for event in ("first_byte", "ended"):
        await started.mind.report(sent.id, Report(event))
    kept = started.mind.records.get(sent.id)
    assert kept is not None
    assert kept.duration is not None
    assert 0 < replica.held_seconds < kept.duration  # it had no space while it waited
    counted = (replica.outstanding_tokens, replica.outstanding_prefills, replica.outstanding_requests)
    assert counted == (0, 0, 0)


async def test_the_approximate_policy_goes_by_its_own_dispatches_alone(cluster) -> None:
    started = await cluster(
        FakeAgent(opening()), FakeAgent(opening(), {Tier.MEMORY: KEYS}), policy="approximate"
    )
    sent = await started.mind.decide(body(TOKENS[:600]), COMPLETIONS)
    assert sent.predicted_tokens == 0
    for event in ("first_byte", "ended"):
        await started.mind.report(sent.id, Report(event))
    decision = await started.decide()
    assert (decision.replica, decision.predicted_tokens) == (sent.replica, 512)


async def test_a_gpu_view_that_records_contradict_is_replaced_by_the_own_dispatches(cluster, until) -> None:
    agents = [FakeAgent(opening(gpu_known=True)) for _ in range(2)]  # whose KV events never arrive
    started = await cluster(*agents)
    sent = await started.mind.decide(body(TOKENS[:600]), COMPLETIONS)
    for event in ("first_byte", "ended"):
        await started.mind.report(sent.id, Report(event))
    agent, replica = agents[int(sent.replica[1])], started.mind.replicas[sent.replica]
    agent.record(record("another", 600, b"", gpu=512))
    await until(lambda: replica.gpu_doubted)
    replica.pending.clear()
    decision = await started.decide()
    assert (decision.replica, decision.predicted_tokens) == (sent.replica, 512)
    agent.delta(Tier.GPU, KEYS[:1])
    await until(lambda: not replica.gpu_doubted)
    assert (await started.decide()).predicted_tokens == 256


async def test_unmanaged_engines_are_followed_by_the_own_dispatches(router) -> None:
    async with FakeEngine() as first, FakeEngine() as second:
        running = await router(replicas=[{"name": "a", "url": first.url}, {"name": "b", "url": second.url}])
        chosen = set()
        for _ in range(6):
            decision = await running.mind.decide(body(), COMPLETIONS)
            await running.mind.report(decision.id, Report("first_byte"))
            await running.mind.report(decision.id, Report("ended"))
            chosen.add(decision.replica)
        assert len(chosen) == 1
        assert decision.predicted_tokens == 4 * 256


async def readyz(http, running: Running) -> tuple[int, str]:
    async with http.get(running.url + "/readyz") as answer:
        return answer.status, (await answer.json()).get("reason", "")


async def test_not_ready_until_every_feed_has_brought_its_index(router, until, http) -> None:
    agents = [FakeAgent(opening(fingerprint=b"")), FakeAgent(opening(), {Tier.DISK: KEYS[:1]})]
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine()) for _ in agents]
        for agent in agents:
            await stack.enter_async_context(agent)
        listed = [
            {"name": f"r{n}", "url": engine.url, "agent": agent.url}
            for n, (engine, agent) in enumerate(zip(engines, agents, strict=True))
        ]
        running = await router(replicas=listed, index={"ready_seconds": 3600})
        status, reason = await readyz(http, running)
        assert (status, "r0" in reason, "r1" in reason) == (503, True, False)
        assert "no engine has registered" in reason
        # The engine of r0 registers: a new epoch, whose snapshot has what the disk kept over the restart.
        agents[0].opening, agents[0].snapshot = opening(epoch=2), {Tier.DISK: KEYS[:3]}
        agents[0].end()
        await until(lambda: running.mind.replicas["r0"].mirror.has(KEYS[2]))
        assert (await readyz(http, running))[0] == 200
        decision = await running.mind.decide(body(), COMPLETIONS)
        assert (decision.replica, decision.predicted_tokens) == ("r0", 768)
        agents[0].opening = opening(fingerprint=b"")  # later breaks do not take the router out
        agents[0].end()
        await until(lambda: not running.mind.replicas["r0"].fingerprinted)
        assert (await readyz(http, running))[0] == 200


async def test_not_ready_until_local_tokens_are_verified(router, until, http, smollm2) -> None:
    async with FakeEngine() as engine:
        engine.tokenizing.clear()
        settings = {"replicas": [{"url": engine.url}], "model": {"path": str(smollm2)}}
        running = await router(**settings, index={"ready_seconds": 3600})
        status, reason = await readyz(http, running)
        assert (status, "local tokens" in reason) == (503, True)
        engine.tokenizing.set()
        await until(lambda: not running.mind.source.unverified, 60)
        assert (await readyz(http, running))[0] == 200


async def test_the_wait_for_feeds_has_a_deadline(cluster, http) -> None:
    started = await cluster(FakeAgent(opening(fingerprint=b"")), index={"ready_seconds": 0.0})
    assert (await readyz(http, started.running))[0] == 200


async def test_series_of_a_removed_replica_go_with_it(router, until, http, tmp_path) -> None:
    file = tmp_path / "replicas.yaml"

    async def metrics(running: Running) -> str:
        async with http.get(running.admin_url + "/metrics") as answer:
            return await answer.text()

    async with FakeEngine() as engine, FakeEngine() as other:
        gone, stays = ({"name": name, "url": item.url} for name, item in (("gone", engine), ("stays", other)))
        file.write_text(json.dumps([gone, stays]))
        calm = {"interval_seconds": 3600}  # no check takes the engine out before a request finds it gone
        running = await router(ready=False, replicas_file=str(file), health=calm)
        replicas = running.mind.replicas
        await until(lambda: len(replicas) == 2 and all(item.healthy for item in replicas.values()))
        await engine.stop()
        while 'upstream_errors_total{replica="gone"}' not in await metrics(running):
            async with http.post(running.url + "/v1/completions", data=body(TOKENS[:8])) as answer:
                await answer.read()
        assert 'replica="gone"' in await metrics(running)
        (tmp_path / "new.yaml").write_text(json.dumps([stays]))
        (tmp_path / "new.yaml").rename(file)
        await until(lambda: len(replicas) == 1)
        async with asyncio.timeout(60):
            while 'replica="gone"' in await metrics(running):  # noqa: ASYNC110 - dropped by the next tick
                await asyncio.sleep(0.02)
        assert 'replica="stays"' in await metrics(running)


async def test_what_one_replica_wrote_to_redis_is_predicted_for_all_that_read_it(cluster, until) -> None:
    redis = (TierSpeed(tier=int(Tier.REDIS), latency_seconds=0.0, bytes_per_second=1e9),)
    writer, reader, other = (FakeAgent(opening(), held) for held in ({Tier.REDIS: KEYS[:3]}, {}, {}))
    writer.speeds = reader.speeds = redis
    started = await cluster(writer, reader, other)
    replicas = started.mind.replicas
    await until(lambda: replicas["r0"].mirror.hit(KEYS).chunks == replicas["r1"].mirror.hit(KEYS).chunks == 3)
    record = started.mind.records.get((await started.decide()).id)
    assert {item.replica: item.reused_tokens for item in record.considered} == {"r0": 768, "r1": 768, "r2": 0}
    reader.speeds = (TierSpeed(tier=int(Tier.REDIS), latency_seconds=0.0, bytes_per_second=0.0),)
    reader.load(EngineLoad())
    await until(lambda: replicas["r1"].mirror.hit(KEYS).chunks == 0)
    writer.end()
    del writer.snapshot[Tier.REDIS]  # the agent starts anew and knows of nothing
    await until(lambda: not started.mind.shared)


SOUND = EngineLoad(prefill_seconds_per_token=1e-3)
SPEED = TierSpeed(tier=Tier.DISK, latency_seconds=0.001, bytes_per_second=1e9)
WRONG_LOADS = [
    (msgspec.structs.replace(SOUND, **{name: value}), SPEED, name)
    for name in ("prefill_seconds_per_token", "prefill_seconds_per_token2")
    for value in (float("inf"), float("nan"), -1.0, 1e300)
] + [
    (msgspec.structs.replace(SOUND, kv_tokens_total=-1), SPEED, "kv_tokens_total"),
    (msgspec.structs.replace(SOUND, waiting_prefill_tokens=2**62), SPEED, "waiting_prefill_tokens"),
    (SOUND, msgspec.structs.replace(SPEED, latency_seconds=float("-inf")), "latency of tier 2"),
    (SOUND, msgspec.structs.replace(SPEED, bytes_per_second=float("nan")), "speed of tier 2"),
]


@pytest.mark.parametrize(("load", "speed", "named"), WRONG_LOADS)
async def test_a_load_that_cannot_be_ends_its_feed_and_fails_no_request(
    cluster, until, caplog, load, speed, named
) -> None:
    wrong, good = FakeAgent(opening()), FakeAgent(opening())
    started = await cluster(wrong, good)
    wrong.speeds = (speed,)
    wrong.load(load)
    replica = started.mind.replicas["r0"]
    await until(lambda: replica.feed_breaks > 0)
    assert isinstance(await started.decide(), Decision)
    assert any(f"feed of r0: {named} is" in line for line in caplog.messages)
    await until(lambda: replica.feed_live and replica.mirror.complete)


@pytest.mark.parametrize(
    "wrong",
    [{"group": 2**32}, {"group": -1}, {"chunk_tokens": 2**62}, {"block_tokens": 2**62}, {"chunk_tokens": -1}],
)
async def test_an_opening_that_cannot_be_is_refused_by_its_figure(cluster, until, wrong) -> None:
    agent, good = FakeAgent(opening()), FakeAgent(opening())
    started = await cluster(agent, good)
    agent.opening = msgspec.structs.replace(agent.opening, **wrong)
    agent.end()
    replica, right = started.mind.replicas["r0"], opening()
    await until(lambda: next(iter(wrong)) in replica.feed_problem)
    assert isinstance(await started.decide(), Decision)
    assert not replica.feed_live
    agent.opening = right
    await until(lambda: replica.feed_live and replica.mirror.complete)


async def test_a_record_that_cannot_be_ends_its_feed(cluster, until) -> None:
    agent = FakeAgent(opening())
    started = await cluster(agent)
    agent.record(
        RequestRecord(
            request="x", prompt_tokens=-5, last_chunk_key=b"", hit_tokens={}, arrived=0.0,
            lookup_seconds=0.0, wait_seconds=0.0, load_seconds=0.0, prefill_seconds=0.0,
        )
    )  # fmt: skip
    replica = started.mind.replicas["r0"]
    await until(lambda: replica.feed_breaks > 0 and replica.feed_live and replica.mirror.complete)
    assert isinstance(await started.decide(), Decision)


@pytest.mark.parametrize("linear", [float("nan"), float("inf"), 1e308])
async def test_a_replica_that_cannot_be_priced_fails_no_request(cluster, caplog, linear: float) -> None:
    """Whatever the reason: here its figures are set behind the checks of the feed."""
    started = await cluster(FakeAgent(opening()), FakeAgent(opening()))
    broken = started.mind.replicas["r0"]
    broken.speeds = Speeds(prefill=PrefillModel(linear, linear))
    for _ in range(3):
        assert isinstance(await started.decide(), Decision)
    said = [line for line in caplog.messages if "priced as if nothing were known" in line]
    assert len(said) == 1
    assert said[0].startswith("r0 ")
