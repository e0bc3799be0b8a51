"""The election: one acts, a dead one is replaced in time, a loser stops at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvist_operator.control.errors import NotLeader, Unavailable
from kvist_operator.control.fenced import FencedApi
from kvist_operator.control.lease import Elector, LeaseTerms, Seen, Step, next_step
from kvist_operator.control.resources import LEASES, Resource
from kvist_operator.control.testing.fake_api import FakeApi

CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def terms(identity: str) -> LeaseTerms:
    return LeaseTerms("kvist", "operator", identity)


def elector(api: Any, identity: str, time: Time) -> Elector:
    return Elector(api, terms(identity), clock=time)


def lease(holder: str, version: str = "1") -> dict[str, Any]:
    return {
        "metadata": {"resourceVersion": version},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15},
    }


@pytest.mark.parametrize(
    ("found", "seen", "step"),
    [
        (None, None, Step.CREATE),
        (lease("me"), None, Step.RENEW),
        (lease(""), None, Step.TAKE),
        (lease("other"), None, Step.WAIT),
        (lease("other"), Seen("1", 90.0), Step.WAIT),
        (lease("other"), Seen("1", 85.0), Step.TAKE),
        ({"metadata": {"resourceVersion": "1"}}, None, Step.TAKE),
    ],
)
def test_the_next_step(found: dict[str, Any] | None, seen: Seen | None, step: Step) -> None:
    assert next_step(found, seen, terms("me"), 100.0) is step


async def test_a_killed_leader_is_replaced_within_twenty_seconds() -> None:
    time, api = Time(), FakeApi()
    first, second = elector(api, "a", time), elector(api, "b", time)
    await first.turn()
    await second.turn()
    assert (first.leading, second.leading) == (True, False)
    killed = time.now  # `first` never renews again
    while not second.leading:
        time.now += second.pause()
        assert not first.leading or not second.leading
        await second.turn()
    assert not first.leading
    assert time.now - killed <= 20.0


async def test_there_is_never_more_than_one_that_may_write() -> None:
    time, api = Time(), FakeApi()
    electors = [elector(api, name, time) for name in "abc"]
    for count in range(400):
        for turn, item in enumerate(electors):
            if (count // 20) % 3 != turn:  # each is frozen for some time, in turn
                await item.turn()
            assert sum(other.leading for other in electors) <= 1
        time.now += 1.0


async def test_a_leader_that_ends_hands_over_at_once() -> None:
    time, api = Time(), FakeApi()
    first, second = elector(api, "a", time), elector(api, "b", time)
    await first.turn()
    await second.turn()
    await first.release()
    assert not first.leading
    await second.turn()
    assert second.leading


async def test_without_an_api_server_the_lease_runs_out_and_writes_stop() -> None:
    time, api = Time(), FakeApi()
    leader = elector(api, "a", time)
    fenced = FencedApi(api, leader.remaining)
    obj = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": "kvist"}}
    await leader.turn()
    await fenced.apply(CONFIG_MAPS, obj)
    api.fail = [Unavailable("down") for _ in range(10)]
    for _ in range(3):
        time.now += leader.pause()
        await leader.turn()
    time.now += 10.0
    await leader.turn()
    assert not leader.leading
    api.fail = []
    with pytest.raises(NotLeader):
        await fenced.apply(CONFIG_MAPS, obj)
    assert await fenced.get(CONFIG_MAPS, "kvist", "x") is not None


async def test_a_write_does_not_outlive_the_lease() -> None:
    class Hanging(FakeApi):
        async def apply(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.Event().wait()

    fenced = FencedApi(Hanging(), lambda: 0.001)
    obj = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": "kvist"}}
    with pytest.raises(NotLeader):
        await fenced.apply(CONFIG_MAPS, obj)


async def test_one_failed_renewal_does_not_lose_the_lease() -> None:
    time, api = Time(), FakeApi()
    leader = elector(api, "a", time)
    await leader.turn()
    time.now += leader.pause()
    api.fail = [Unavailable("once")]
    await leader.turn()
    assert leader.leading
    time.now += leader.pause()
    await leader.turn()
    assert leader.remaining() > 10.0


async def test_an_api_server_that_is_silent_is_told_in_words(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeApi()
    api.fail = [TimeoutError()]
    await elector(api, "a", Time()).turn()
    assert "lease kvist/operator: no answer" in caplog.text


async def test_transitions_are_counted() -> None:
    time, api = Time(), FakeApi()
    first, second = elector(api, "a", time), elector(api, "b", time)
    await first.turn()
    await first.release()
    await second.turn()
    live = api.read(LEASES, "kvist", "operator")
    assert live is not None
    assert live["spec"]["leaseTransitions"] == 1
    assert live["spec"]["holderIdentity"] == "b"
