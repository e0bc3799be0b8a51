"""Certificates of the webhook over months: what is served is trusted at every moment, whatever lags."""

from __future__ import annotations

import asyncio
import base64
import datetime
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvist_operator.control.counted import CountedApi
from kvist_operator.control.errors import Conflict, NotLeader
from kvist_operator.control.fenced import FencedApi
from kvist_operator.control.resources import SECRETS
from kvist_operator.control.testing.fake_api import FakeApi
from kvist_operator.webhook import certificates
from kvist_operator.webhook.certificates import Material, names_of, signed_by
from kvist_operator.webhook.keeper import CONFIGURATIONS, Keeper, Place, Reader, decoded

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NAME = "kvist-webhook.kvist-system.svc"
PLACE = Place("kvist-system", "kvist-webhook", "kvist", (NAME, "172.30.0.2"))
HOOK = "cacheclusters.kvist.dev"


class World:
    """Secret and configuration as the chart makes them; two replicas and an API server that read later."""

    def __init__(self) -> None:
        self.now = START
        self.server = FakeApi()
        self.api = CountedApi(self.server)
        self.leading = True
        self.put_secret({})
        self.put_configuration()
        self.keeper = Keeper(self.api, PLACE, lambda: self.leading, lambda: self.now)
        self.served: list[Material] = [Material(), Material()]
        self.readers = [Reader(self.api, PLACE, self.loads(n)) for n in range(2)]
        self.trusts: tuple[Any, ...] = ()

    def loads(self, replica: int) -> Any:
        def load(chain: bytes, key: bytes) -> None:
            self.served[replica] = certificates.read({"tls.crt": chain, "tls.key": key})

        return load

    def put_secret(self, data: dict[str, str]) -> None:
        self.server.put(
            SECRETS, {"metadata": {"namespace": PLACE.namespace, "name": PLACE.secret}, "data": data}
        )

    def put_configuration(self) -> None:
        hook = {"name": HOOK, "clientConfig": {"service": {"name": "kvist-webhook"}}}
        self.server.put(
            CONFIGURATIONS,
            {"metadata": {"namespace": "", "name": PLACE.configuration}, "webhooks": [hook]},
        )

    @property
    def secret(self) -> Material:
        found = self.server.read(SECRETS, PLACE.namespace, PLACE.secret)
        assert found is not None
        return certificates.read(decoded(found))

    def configured(self) -> tuple[Any, ...]:
        found = self.server.read(CONFIGURATIONS, "", PLACE.configuration)
        assert found is not None
        (hook,) = found["webhooks"]
        return certificates.certificates(base64.b64decode(hook["clientConfig"].get("caBundle") or ""))

    async def all_read(self) -> None:
        for reader in self.readers:
            await reader.turn()
        self.trusts = self.configured()

    async def settle(self) -> None:
        await self.keeper.turn()
        await self.all_read()

    def check(self) -> None:
        """Every replica serves what the API server would believe now."""
        for served in self.served:
            certificate = served.serving
            assert certificate is not None
            assert certificate.not_valid_before_utc <= self.now < certificate.not_valid_after_utc
            signers = [item for item in self.trusts if signed_by(certificate, item)]
            assert [item for item in signers if item.not_valid_after_utc > self.now]
            assert set(names_of(certificate)) == set(PLACE.names)


async def test_from_empty_objects_one_turn_makes_a_trusted_certificate() -> None:
    world = World()
    await world.settle()
    world.check()
    assert dict(world.api.writes()) == {
        ("update", "", "secrets"): 2,
        ("patch", CONFIGURATIONS.group, CONFIGURATIONS.plural): 1,
    }


async def test_nothing_is_written_while_nothing_is_due() -> None:
    world = World()
    await world.settle()
    before = world.api.writes()
    for _ in range(20):
        world.now += datetime.timedelta(hours=12)
        await world.settle()
    assert world.api.writes() == before


async def test_a_certificate_is_renewed_by_the_same_authority_a_month_before_its_end() -> None:
    world = World()
    await world.settle()
    first = world.secret
    world.now += datetime.timedelta(days=61)
    await world.settle()
    world.check()
    assert world.secret.authorities == first.authorities
    assert world.secret.serving != first.serving


async def test_authorities_overlap_when_one_follows_another() -> None:
    world = World()
    await world.settle()
    (old,) = world.secret.authorities
    for _ in range(6):
        world.now += datetime.timedelta(days=61)
        await world.settle()
    assert world.trusts[0] == old
    assert len(world.trusts) == 2
    assert world.secret.serving is not None
    assert signed_by(world.secret.serving, old)
    world.now += datetime.timedelta(hours=1)
    await world.settle()
    assert signed_by(world.secret.serving, world.trusts[1])
    assert len(world.trusts) == 2
    world.now += datetime.timedelta(hours=1)
    await world.settle()
    world.check()
    (new,) = world.trusts
    assert new != old


MOVES = st.sampled_from(("minutes", "hours", "weeks", "months", "leader", "replica", "server", "key lost"))


@settings(max_examples=100, deadline=None)
@example(["key lost", "leader", "leader", "replica"])
@example(["key lost", "months"] * 3 + ["key lost", "leader", "replica"])
@example(["key lost", "leader", "hours", "hours", "leader", "leader", "server"])
@given(st.lists(MOVES, max_size=60))
def test_one_trusted_authority_has_always_signed_what_is_served(moves: list[str]) -> None:
    asyncio.run(replay(moves))


async def replay(moves: list[str]) -> None:
    """Time passes, the leader takes turns or not, replicas and API server read or not, keys are lost."""
    world = World()
    await world.settle()
    spans = {"minutes": 5 / 60 / 24, "hours": 0.5 / 24, "weeks": 7, "months": 29}
    for move in moves:
        if move in spans:
            # All read within minutes, long before what is read could end.
            await world.all_read() if move != "minutes" else None
            world.now += datetime.timedelta(days=spans[move])
            await world.all_read()
            await world.settle() if move == "months" else None
        elif move == "leader":
            await world.keeper.turn()
        elif move == "replica":
            await world.readers[0].turn()
        elif move == "server":
            world.trusts = world.configured()
        else:
            live = world.server.read(SECRETS, PLACE.namespace, PLACE.secret)
            assert live is not None
            world.put_secret({**live["data"], "ca.key": ""})
        if not lapsed(world):
            world.check()


def lapsed(world: World) -> bool:
    """Nobody renewed for so long that what is served has ended."""
    return any(m.serving is None or m.serving.not_valid_after_utc <= world.now for m in world.served)


@pytest.mark.parametrize("lost", ["tls.crt", "tls.key", "ca.crt", "ca.key"])
@pytest.mark.parametrize("value", ["", "bm90IFBFTQ==", "%"])
async def test_whatever_is_lost_of_the_secret_heals(lost: str, value: str) -> None:
    world = World()
    await world.settle()
    live = world.server.read(SECRETS, PLACE.namespace, PLACE.secret)
    assert live is not None
    world.put_secret({**live["data"], lost: value, "note": "a2VwdA=="})
    for _ in range(3):
        await world.settle()
        world.now += datetime.timedelta(hours=2)
    world.check()
    healed = world.server.read(SECRETS, PLACE.namespace, PLACE.secret)
    assert healed is not None
    assert healed["data"]["note"] == "a2VwdA=="


async def test_everything_that_ended_long_ago_is_made_anew_in_one_turn() -> None:
    world = World()
    await world.settle()
    world.now += datetime.timedelta(days=3000)
    await world.settle()
    world.check()
    assert len(world.trusts) == 1


async def test_a_bundle_that_somebody_took_away_comes_back() -> None:
    world = World()
    await world.settle()
    world.put_configuration()
    assert not world.configured()
    await world.settle()
    world.check()


async def test_a_certificate_for_other_names_is_replaced() -> None:
    world = World()
    other = Place(PLACE.namespace, PLACE.secret, PLACE.configuration, ("old-name.svc",))
    await Keeper(world.api, other, lambda: True, lambda: world.now).turn()
    await world.settle()
    world.check()


async def test_who_does_not_lead_writes_nothing_but_serves() -> None:
    world = World()
    world.leading = False
    await world.settle()
    assert not world.api.calls[("get", CONFIGURATIONS.group, CONFIGURATIONS.plural)]
    assert not world.api.writes()
    fenced = FencedApi(world.api, lambda: 0.0)
    with pytest.raises(NotLeader):
        await fenced.replace(SECRETS, {"metadata": {}})
    await Keeper(fenced, PLACE, lambda: True, lambda: world.now).turn()
    assert not world.api.writes()
    world.leading = True
    await world.settle()
    world.leading = False
    await world.settle()
    world.check()


async def test_a_secret_that_another_changed_meanwhile_is_read_again() -> None:
    world = World()
    world.server.fail.append(Conflict("changed", 409))
    with pytest.raises(Conflict):
        await world.keeper.turn()
    await world.settle()
    world.check()


@pytest.mark.parametrize("missing", ["secret", "configuration"])
async def test_what_the_chart_did_not_make_is_said_once(
    missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    if missing == "secret":
        world.server.remove(SECRETS, PLACE.namespace, PLACE.secret)
    else:
        world.server.remove(CONFIGURATIONS, "", PLACE.configuration)
    for _ in range(3):
        await world.keeper.turn()
    said = [record.message for record in caplog.records if "helm upgrade" in record.message]
    assert len(said) == 1
