"""A real S3 server that answers wrongly, late or not at all: the agent goes on without it and comes back."""

import asyncio

import pytest
from tests.connector.faults.conftest import SOON

from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.fault_proxy import Answer, Cut, Hang, Pass, Refuse
from kvist_connector.testing.services import BUCKET
from kvist_connector.testing.whole_agent import DEADLINE, keys_of

pytestmark = pytest.mark.timeout(240)


def xml(code):
    return b"<?xml version='1.0'?><Error><Code>%s</Code><Message>no</Message></Error>" % code


FAULTS = {
    "5xx": Answer("503 Slow Down", xml(b"SlowDown")),
    "denied": Answer("403 Forbidden", xml(b"AccessDenied")),
    "clock skew": Answer("403 Forbidden", xml(b"RequestTimeTooSkewed")),
    "truncated body": Cut(after=200),
    "connection refused": Refuse(),
}
SAID = {"denied": "access denied", "clock skew": "set the time of both", "5xx": "SlowDown"}


@pytest.fixture
def settings(s3):
    server, proxy = s3
    return {
        "url": server.url,
        "endpoint": f"http://127.0.0.1:{proxy.port}",
        "region": "us-east-1",
        "credentials_file": server.credentials_file,
        **SOON,
    }


async def said(agent, text):
    """Wait until the tier's problem is told in these words: lookups alone learn no more than a status."""
    async with asyncio.timeout(DEADLINE):
        while text not in (await agent.stats())["tiers"]["object"]["problem"]:
            pass  # each look is a request that waits for its answer


async def lost_and_back(agent, end):
    """A tier that fails: nothing wrong is served, the prompt is computed again, and all is as before."""
    assert await agent.found(keys_of(6)) == []
    await agent.computed(keys_of(6))
    await agent.until_answers(Tier.OBJECT, False)
    assert len(await agent.found(keys_of(6), memory=True)) == 6
    await end()
    await agent.until_answers(Tier.OBJECT, True)
    await agent.computed(keys_of(7), start=6)
    await agent.written()
    assert await agent.found(keys_of(7)) == [Tier.OBJECT] * 7
    await agent.check()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_of_s3_is_a_miss_told_once_and_over_when_it_is_over(
    start, s3, settings, fault, warnings_of
):
    _, proxy = s3
    agent = await start(object_store=settings)
    await agent.computed(keys_of(6))
    await agent.written()
    proxy.turn(FAULTS[fault])

    async def end():
        await said(agent, SAID.get(fault, "s3://"))
        proxy.turn(Pass())

    await lost_and_back(agent, end)
    told = warnings_of(Tier.OBJECT)
    assert told
    assert set(told.values()) == {1}


async def test_a_body_that_breaks_off_while_it_is_read_is_never_served(start, s3, settings, warnings_of):
    """The answer to the question is short enough to pass, the chunk is not."""
    _, proxy = s3
    agent = await start(object_store=settings)
    await agent.computed(keys_of(6))
    await agent.written()
    proxy.turn(Cut(after=9000))
    assert await agent.found(keys_of(6)) == []
    assert await agent.found(keys_of(6)) == []
    assert (await agent.stats())["tier_counters"]["object"]["read_failed"] >= 1
    assert warnings_of(Tier.OBJECT)["read_failed"] == 1
    proxy.turn(Pass())
    await agent.until_answers(Tier.OBJECT, True)
    assert await agent.found(keys_of(6)) == [Tier.OBJECT] * 6
    await agent.check()


async def test_a_slow_s3_holds_no_request(start, s3, settings, warnings_of):
    _, proxy = s3
    agent = await start(object_store=settings | {"lookup_deadline": 0.2, "deadline": 0.5})
    proxy.turn(Hang())
    async with asyncio.timeout(DEADLINE):
        assert await agent.found(keys_of(6)) == []
        await agent.computed(keys_of(6))
        await agent.until_answers(Tier.OBJECT, False)
    proxy.turn(Pass())
    await agent.until_answers(Tier.OBJECT, True)
    assert set(warnings_of(Tier.OBJECT).values()) == {1}
    await agent.check()


async def test_a_bucket_that_goes_and_comes_back(start, s3, settings, warnings_of):
    server, _ = s3
    agent = await start(object_store=settings)
    await agent.computed(keys_of(6))
    await agent.written()
    server.remove_bucket()

    async def end():
        await said(agent, "NoSuchBucket")
        (server.folder / BUCKET).mkdir()

    await lost_and_back(agent, end)
    assert set(warnings_of(Tier.OBJECT).values()) == {1}


async def test_objects_cut_on_the_server_are_deleted_and_written_again(start, s3, settings, warnings_of):
    server, _ = s3
    agent = await start(object_store=settings)
    await agent.computed(keys_of(6))
    await agent.written()
    (path,) = (path for path in server.folder.rglob("*") if path.name == keys_of(6)[2].hex())
    path.write_bytes(path.read_bytes()[:-1])
    assert await agent.found(keys_of(6)) == [Tier.OBJECT] * 2
    await agent.computed(keys_of(6), start=2)
    await agent.written()
    assert await agent.found(keys_of(6)) == [Tier.OBJECT] * 6
    assert sum(warnings_of(Tier.OBJECT).values()) == 1
    await agent.check()
