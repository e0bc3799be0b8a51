"""Labels of metrics have values of the router's own: whatever clients send, no series comes of it."""

from __future__ import annotations

from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvist_connector.protocol.engine import RequestRecord
from kvist_connector.protocol.feed import FEED_VERSION, Opening
from kvist_connector.protocol.tiers import Tier
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.feed import FakeAgent

CHAT = "/v1/chat/completions"
OPENING = Opening(
    version=FEED_VERSION, epoch=1, replica="r", fingerprint=b"f" * 32, group=0, model="m", chunk_tokens=256,
    block_tokens=32, gpu_known=False, draining=False,
)  # fmt: skip


def record(request: str) -> RequestRecord:
    return RequestRecord(
        request=request, prompt_tokens=600, last_chunk_key=b"", hit_tokens={Tier.MEMORY: 256}, arrived=0.0,
        lookup_seconds=0.0, wait_seconds=0.0, load_seconds=0.0, prefill_seconds=0.1,
    )  # fmt: skip


async def series(http: aiohttp.ClientSession, url: str) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    async with http.get(url + "/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    return {(item.name, tuple(sorted(item.labels.items()))) for found in families for item in found.samples}


class Client:
    """Whose every request is unlike any before: tenant, model, path, method, user, tags, headers."""

    def __init__(self, http: aiohttp.ClientSession, url: str, agent: FakeAgent) -> None:
        self.http, self.url, self.agent = http, url, agent
        self.recorded: list[str] = []

    async def send(self, number: int) -> None:
        own = {"x-tenant": f"tenant-{number}", "x-session-id": f"s{number}", "user-agent": f"a{number}"}
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": f"{number}"}]}
        body |= {"user": f"u{number}", "kvist": {"tags": [f"tag-{number}"]}, "stream": number % 2 == 0}
        assert await self._ask("POST", CHAT, own, body) == 200
        assert await self._ask("POST", CHAT, own, body | {"model": f"model-{number}"}) == 404
        assert await self._ask("POST", CHAT, own, {"model": "m", f"field-{number}": 1}) < 500
        assert await self._ask("GET", f"/path-{number}", own) == 404
        assert await self._ask(f"METHOD{number % 7}", CHAT, own) in (400, 405)
        assert await self._ask("GET", f"/v1/responses/resp_{number}", own) == 404

    async def _ask(self, method: str, path: str, headers: dict[str, str], body: Any = None) -> int:
        async with self.http.request(method, self.url + path, headers=headers, json=body) as answer:
            await answer.read()
            if answer.status == 200:
                self.recorded.append(answer.headers["x-kvist-request-id"])
                self.agent.record(record(self.recorded[-1]))
            return answer.status


async def test_clients_make_no_series(router, http, until) -> None:
    async with FakeEngine() as engine, FakeAgent(OPENING) as agent:
        replicas = [{"name": "r", "url": engine.url, "agent": agent.url}]
        running = await router(replicas=replicas, tenant={"others": {"requests_per_minute": 1_000_000}})
        client = Client(http, running.url, agent)

        async def sent(numbers: range) -> None:
            for number in numbers:
                await client.send(number)
            kept = [running.mind.records.get(item) for item in client.recorded]
            await until(lambda: all(item is not None and item.actual for item in kept))

        await sent(range(6))
        before = await series(http, running.admin_url)
        await sent(range(6, 60))
        assert await series(http, running.admin_url) == before
        values = {value for _, labels in before for _, value in labels}
        assert {"r", "m", "other", "memory"} <= values
        assert not [value for value in values if "tenant-" in value or "model-" in value]
