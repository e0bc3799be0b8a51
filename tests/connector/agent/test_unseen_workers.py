"""An engine ends while its agent can open no file: who still writes cannot be seen, and is seen later."""

import asyncio
import os
import resource
from contextlib import contextmanager

from kvist_connector.protocol import engine as wire
from kvist_connector.testing.fake_engine import Connection, layout
from kvist_connector.testing.whole_agent import DEADLINE, WholeAgent, keys_of


@contextmanager
def nothing_opens():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def until(condition):
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0)


async def test_its_slots_come_back_when_files_can_be_opened_again(tmp_path):
    agent = await WholeAgent.start(tmp_path)
    await agent.computed(keys_of(2))
    granted = await agent.engine.grant(1)
    core, slots = agent.parts.core, agent.parts.memory.slots
    with nothing_opens():
        await agent.engine.scheduler.close()
        await until(lambda: not core.schedulers)
        assert slots.counts()["quarantine"] >= 1, "given away while a worker may be writing"
    worker = agent.engine.workers[0]  # alive, and has not said that it came to rest
    await until(lambda: slots.awaited() == {worker.member})
    assert not worker.fill(granted[0], bytes(worker.slot_size))
    await agent.new_engine()
    await agent.check()
    await agent.computed(keys_of(2, first=500))
    await agent.stop()


async def test_a_worker_that_nobody_sees_may_be_writing_until_it_says_that_it_is_not(tmp_path):
    """Its connection is gone and it lives; it comes back before files can be looked at."""
    agent = await WholeAgent.start(tmp_path)
    (granted,) = await agent.engine.grant(1)
    core, slots, worker = agent.parts.core, agent.parts.memory.slots, agent.engine.workers[0]
    await worker.connection.close()
    await until(lambda: len(core.sessions) == len(core.schedulers))
    with nothing_opens():
        await agent.engine.scheduler.close()
        await until(lambda: not core.schedulers)
        assert slots.counts()["quarantine"] >= 1, "given away while a worker may be writing"
    hello = wire.Hello(protocol=1, role="worker", engine="e", member=worker.member, rank=0, pid=os.getpid())
    again = await Connection.open(agent.socket, hello)
    again.send(wire.Register(layout=layout()))
    ticket = (await again.expect(wire.Quiesce)).ticket
    assert slots.counts()["quarantine"] >= 1
    again.send(wire.Quiesced(ticket=ticket))
    await until(lambda: not slots.awaited())
    assert slots.counts()["quarantine"] == 0
    assert not worker.fill(granted, bytes(worker.slot_size))
    await again.close()
    await agent.new_engine()
    await agent.check()
    await agent.stop()
