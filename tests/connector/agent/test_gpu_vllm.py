"""The engine's own publisher and event classes against our decoder: what vLLM sends is what we read."""

import asyncio

import pytest

from kvist_connector.agent.gpu_events import GpuEvents
from kvist_connector.agent.gpu_index import GpuIndex
from kvist_connector.testing.fake_engine import layout, prompt_keys

kv_events = pytest.importorskip("vllm.distributed.kv_events")
DEADLINE = 20.0


def stored(tokens, first, parent, **changes):
    hashes = list(range(first, first + len(tokens) // 4))
    values = {"lora_id": None, "lora_name": None, "extra_keys": None, "group_idx": 0, "medium": "GPU"}
    return kv_events.BlockStored(
        block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=4, **(values | changes)
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_events_of_the_real_publisher_are_followed_and_replayed(tmp_path):
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher = kv_events.ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=replay)
    changed = asyncio.Event()
    index = GpuIndex(lambda key, added: changed.set(), lambda known: changed.set())
    index.serve(layout())
    events = GpuEvents(endpoint, replay, index)

    def publish(*batch):
        publisher.publish(kv_events.KVEventBatch(ts=0.0, events=list(batch)))

    async def until(wanted):
        async with asyncio.timeout(DEADLINE):
            while not wanted():
                changed.clear()
                await changed.wait()

    publish(stored(list(range(8)), 1, None))
    publish(stored(list(range(8, 24)), 3, 2, session_id="s"))
    # What its thread sends between our replay and our subscription would be seen with the next event only.
    await asyncio.wait_for(asyncio.to_thread(publisher._event_queue.join), DEADLINE)
    task = asyncio.create_task(events.run())
    try:
        events.engine_arrived("engine")
        await until(lambda: len(index) == 6)
        assert set(prompt_keys(range(24))) <= set(index.keys())
        publish(kv_events.BlockRemoved(block_hashes=[6], medium="GPU", group_idx=0))
        await until(lambda: len(index) == 5)
        publish(kv_events.AllBlocksCleared())
        await until(lambda: len(index) == 0)
        publish(stored(list(range(8)), 1, None, extra_keys=[("tenant",), None]))
        await until(lambda: len(index) == 2)
        assert not set(prompt_keys(range(8))) & set(index.keys())
        assert (index.known, events.undecodable, events.gaps) == (True, 0, 0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        events.close()
        publisher.shutdown()
