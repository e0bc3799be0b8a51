"""What a relay does when the mind goes, and when it is back."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvist_router.access.salt import tenant_salt
from kvist_router.metrics import RelayMetrics
from kvist_router.mind.fallback import GONE, HashMind
from kvist_router.mind.interface import Decision, Known, Metadata, Refusal, Report, View
from kvist_router.mind.remote import RemoteMind
from kvist_router.mind.socket import MindClient, MindServer

CHAT = Metadata("chat")
SECRET = b"0123456789abcdef"


def view(problem: str = "", count: int = 4, model: str = "m") -> View:
    replicas = tuple(Known(f"r{number}", f"http://r{number}", (model,)) for number in range(count))
    return View(problem, {model: None}, replicas, tuple(item.name for item in replicas))


def body(text: str = "x", **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hashing(clock: Clock) -> HashMind:
    mind = HashMind(None, 1000, clock)
    mind.view = view()
    return mind


async def decided(mind: HashMind, data: bytes, metadata: Metadata = CHAT) -> Decision:
    answer = await mind.decide(data, metadata)
    assert isinstance(answer, Decision), answer
    return answer


async def test_prompts_that_begin_alike_go_to_one_replica_and_others_spread(hashing: HashMind) -> None:
    long = "a" * 4096
    for turns in ([], [{"role": "assistant", "content": "b"}], [{"role": "user", "content": "c"}] * 3):
        fields = {"messages": [{"role": "user", "content": long}, *turns], "temperature": len(turns)}
        decision = await decided(hashing, json.dumps(fields).encode())
        await hashing.report(decision.id, Report("ended"))
        assert decision.routed_by == "hash"
        assert decision.replica == (await decided(HashMind_like(hashing), body(long))).replica
    spread = set()
    for number in range(32):
        decision = await decided(hashing, body(str(number)))
        await hashing.report(decision.id, Report("ended"))
        spread.add(decision.replica)
    assert len(spread) == 4


def HashMind_like(mind: HashMind) -> HashMind:  # noqa: N802 - reads as a constructor
    """Another relay's."""
    other = HashMind(None, 1000)
    other.view = mind.view
    return other


@pytest.mark.parametrize(
    "part", ['"\\ud800"', "1" + "0" * 30, '{"a": [-0.0, null, "\\udfff"]}', "[" * 800 + "]" * 800]
)
async def test_contents_of_any_json_have_a_replica(hashing: HashMind, part: str) -> None:
    data = f'{{"messages": [{{"role": "user", "content": [{part}]}}]}}'
    assert (await decided(hashing, data.encode())).replica


@pytest.fixture
def usual_recursion() -> Iterator[None]:
    """The interpreter's own limit: libraries that others load here raise it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion")
async def test_contents_of_any_depth_have_a_replica_or_are_refused(hashing: HashMind) -> None:
    """At some depth they can still be read, and not be written again."""
    found = set()
    for depth in (*range(800, 1010), 100_000):
        data = f'{{"messages": [{{"role": "user", "content": {"[" * depth}{"]" * depth}}}]}}'
        found.add(type(await hashing.decide(data.encode(), CHAT)))
    assert found == {Decision, Refusal}


async def test_a_burst_of_one_prompt_is_shared_when_its_replica_is_at_its_bound(hashing: HashMind) -> None:
    chosen = [(await decided(hashing, body())).replica for _ in range(16)]
    assert max(map(chosen.count, set(chosen))) <= 6


@pytest.mark.parametrize(
    ("data", "metadata", "status", "code"),
    [
        (b"{", CHAT, 400, "invalid_json"),
        (body(kv_transfer_params={"host": "a"}), CHAT, 400, None),
        (body(model="other"), CHAT, 404, "model_not_found"),
        (b'{"input": "x", "previous_response_id": "resp"}', Metadata("responses"), 503, "no_mind"),
        (b"", Metadata("stored", response="resp"), 503, "no_mind"),
        (body(), Metadata("chat", id="a", exclude=("r0", "r1", "r2", "r3")), 503, "no_replica"),
    ],
)
async def test_what_may_not_pass_does_not_pass_without_a_mind(
    hashing: HashMind, data: bytes, metadata: Metadata, status: int, code: str | None
) -> None:
    answer = await hashing.decide(data, metadata)
    assert isinstance(answer, Refusal)
    assert (answer.status, answer.code) == (status, code)


async def test_tenants_stay_apart_and_tags_are_moved() -> None:
    mind = HashMind(SECRET, 10)
    mind.view = view()
    sent = body(cache_salt="mine", kvist={"tags": ["t"]})
    decision = await decided(mind, sent, Metadata("chat", tenant="a"))
    assert decision.body is not None
    fields = json.loads(decision.body)
    assert fields["cache_salt"] == tenant_salt(SECRET, "a")
    assert fields["kv_transfer_params"] == {"tags": ["t"]}
    assert (await decided(mind, b'{"prompt": "x"}', Metadata("tokens"))).body is None


async def test_requests_at_once_are_bounded_and_each_end_makes_room() -> None:
    mind = HashMind(None, 2)
    mind.view = view()
    first, _ = await decided(mind, body()), await decided(mind, body())
    refusal = await mind.decide(body(), CHAT)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "overloaded"
    await mind.report(first.id, Report("first_byte"))
    assert isinstance(await mind.decide(body(), CHAT), Refusal)
    await mind.report(first.id, Report("ended"))
    assert isinstance(await mind.decide(body(), CHAT), Decision)


async def test_a_replica_that_cannot_be_reached_is_left_alone_for_a_while(
    hashing: HashMind, clock: Clock
) -> None:
    first = await decided(hashing, body())
    await hashing.report(first.id, Report("failed", "refused", unreachable=True))
    again = await decided(hashing, body())
    await hashing.report(again.id, Report("ended"))
    assert again.replica != first.replica
    clock.now += 6
    assert (await decided(hashing, body())).replica == first.replica


# ---- the mind comes and goes


class SaysMind:
    """Decides for `r9`; waits for `gate` before."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.given_up = asyncio.Event()
        self.reports: list[tuple[str, str]] = []

    async def decide(self, data: bytes, metadata: Metadata) -> Decision | Refusal:
        self.asked.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        return Decision("id", "r9", "http://r9", 0, 0, False)

    async def report(self, request_id: str, report: Report) -> None:
        self.reports.append((request_id, report.event))


class Minds:
    """A socket at which minds come and go."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mind = SaysMind()
        self.server: MindServer | None = None

    async def come(self, told: View, beat_seconds: float = 0.01) -> None:
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.path))
        listener.listen()
        listener.setblocking(False)
        self.server = MindServer(self.mind, lambda: told, beat_seconds)
        await self.server.start(listener)

    async def go(self) -> None:
        if self.server is not None:
            await self.server.close()


@pytest.fixture
async def minds(tmp_path):
    found = Minds(tmp_path / "mind.sock")
    yield found
    await found.go()


@pytest.fixture
async def remote(minds: Minds, clock: Clock):
    metrics = RelayMetrics(CollectorRegistry())
    mind = RemoteMind(minds.path, HashMind(None, 100), metrics, metrics.keep, 30.0, 60.0, clock)
    following = asyncio.create_task(mind.follow())
    yield mind
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def routed_by(mind: RemoteMind) -> str | None:
    answer = await mind.decide(body(), CHAT)
    if isinstance(answer, Refusal):
        return answer.code
    await mind.report(answer.id, Report("ended"))
    return answer.routed_by


async def test_a_router_whose_mind_was_never_there_is_not_ready_and_refuses(remote: RemoteMind) -> None:
    assert "not answered yet" in remote.view().problem
    assert await remote.decide(body(), CHAT) == GONE
    assert remote.degraded() == ""


async def test_by_hash_while_the_mind_is_gone_and_until_the_next_one_has_a_view(
    remote: RemoteMind, minds: Minds, clock: Clock, until, caplog
) -> None:
    caplog.set_level("WARNING")
    await minds.come(view())
    await until(lambda: remote.view().problem == "")
    assert await routed_by(remote) == ""
    await minds.go()
    await until(lambda: remote.degraded() != "")
    assert await routed_by(remote) == "hash"
    assert remote.view().problem == ""  # a request would succeed
    await minds.come(view("r0: what it holds is not known yet", count=1))
    await until(lambda: "has no view yet" in remote.degraded())
    assert await routed_by(remote) == "hash"
    assert len(remote.view().replicas) == 4  # what the last one knew
    await minds.go()
    await minds.come(view(count=3))
    await until(lambda: remote.degraded() == "")
    assert await routed_by(remote) == ""
    assert len(remote.view().replicas) == 3
    said = [record.message for record in caplog.records]
    assert [text.split(":")[0] for text in said] == ["the mind is gone", "the mind is back"]


async def test_a_mind_that_gets_no_view_is_asked_all_the_same_in_the_end(
    remote: RemoteMind, minds: Minds, clock: Clock, until
) -> None:
    await minds.come(view())
    await until(lambda: remote.view().problem == "")
    await minds.go()
    await until(lambda: remote.degraded() != "")
    await minds.come(view("all engines are down"))
    await until(lambda: "has no view yet" in remote.degraded())
    clock.now += 31
    await until(lambda: remote.degraded() == "")
    assert remote.view().problem == "all engines are down"


async def test_a_decision_that_is_waited_for_goes_by_hash_when_the_mind_goes(
    remote: RemoteMind, minds: Minds, until
) -> None:
    await minds.come(view())
    await until(lambda: remote.view().problem == "")
    minds.mind.gate.clear()
    asking = asyncio.create_task(routed_by(remote))
    await minds.mind.asked.wait()
    await minds.go()
    assert await asking == "hash"


async def test_a_question_given_up_gives_its_place_in_the_minds_queue_back(minds: Minds) -> None:
    await minds.come(view())
    told = asyncio.Event()
    client = MindClient(minds.path, lambda _: told.set())
    following = asyncio.create_task(client.follow())
    await told.wait()
    minds.mind.gate.clear()
    asking = asyncio.create_task(client.decide(body(), CHAT))
    await minds.mind.asked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(minds.mind.given_up.wait(), 60)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_decision_that_fails_is_one_requests_500_and_no_others(minds: Minds) -> None:
    class Breaks(SaysMind):
        async def decide(self, data: bytes, metadata: Metadata) -> Decision | Refusal:
            if metadata.tenant == "breaks":
                raise RuntimeError("a fault")
            return await super().decide(data, metadata)

    minds.mind = Breaks()
    minds.mind.gate.clear()
    await minds.come(view())
    told = asyncio.Event()
    client = MindClient(minds.path, lambda _: told.set())
    following = asyncio.create_task(client.follow())
    await told.wait()
    waiting = asyncio.create_task(client.decide(body(), CHAT))
    await minds.mind.asked.wait()
    broken = await client.decide(body(), Metadata("chat", tenant="breaks"))
    assert isinstance(broken, Refusal)
    assert broken.status == 500
    minds.mind.gate.set()
    assert isinstance(await waiting, Decision)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_mind_that_is_silent_is_gone(minds: Minds) -> None:
    await minds.come(view(), beat_seconds=1000)
    client = MindClient(minds.path, silent_seconds=0.05)
    assert "silent for 0.05 s" in await asyncio.wait_for(client.follow(), 60)
