"""The webhook of a whole operator: off by default; on, it makes its own certificate and answers with it."""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from kvist_connector.settings import validate
from kvist_operator.control.counted import CountedApi
from kvist_operator.control.metrics import Metrics
from kvist_operator.control.resources import SECRETS
from kvist_operator.control.supervise import Supervisor
from kvist_operator.control.testing.fake_api import FakeApi
from kvist_operator.control.vitals import Vitals
from kvist_operator.render.kube import Context, Images
from kvist_operator.settings import OperatorSettings
from kvist_operator.webhook.keeper import CONFIGURATIONS
from kvist_operator.webhook.run import admission
from kvist_operator.webhook.server import PATH_VALIDATE

CONTEXT = Context("", "", Images("engine", "router", "agent", "redis"))
ON = {"configuration": "hooks", "host": "localhost", "names": ["localhost"], "port": 0, "seconds": 0.01}


class Cluster:
    """What the chart makes, on a fake API server."""

    def __init__(self) -> None:
        self.server = FakeApi()
        self.api = CountedApi(self.server)
        self.server.put(SECRETS, {"metadata": {"namespace": "kvist-system", "name": "kvist-webhook"}})
        hook = {"name": "cacheclusters.kvist.dev", "clientConfig": {}}
        self.server.put(CONFIGURATIONS, {"metadata": {"namespace": "", "name": "hooks"}, "webhooks": [hook]})

    def bundle(self) -> str:
        found = self.server.read(CONFIGURATIONS, "", "hooks")
        assert found is not None
        return base64.b64decode(found["webhooks"][0]["clientConfig"].get("caBundle") or "").decode()

    @asynccontextmanager
    async def operator(self, *, leading: bool = True, **webhook: Any) -> AsyncIterator[int]:
        settings = validate(OperatorSettings, {"namespace": "kvist-system", "webhook": webhook})
        supervisor = Supervisor(Metrics(CollectorRegistry()), Vitals(asyncio.get_running_loop().time))
        now = partial(datetime.datetime.now, datetime.UTC)
        async with admission(settings, self.api, CONTEXT, lambda: leading, now, supervisor) as port:
            yield port

    async def ask(self, port: int) -> Any:
        """As soon as what is trusted is served."""
        obj = {
            "apiVersion": "kvist.dev/v1alpha1",
            "kind": "CacheCluster",
            "metadata": {"name": "demo"},
            "spec": {"model": {"name": "owner/Model-8B"}, "cache": {"memory": "8Mi"}},
        }
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
        body = json.dumps({**review, "request": {"uid": "1", "object": obj}})
        async with asyncio.timeout(60), aiohttp.ClientSession(trust_env=False) as session:
            while True:
                try:
                    trust = ssl.create_default_context(cadata=self.bundle() or None)
                    url = f"https://localhost:{port}{PATH_VALIDATE}"
                    async with session.post(url, data=body, ssl=trust) as answer:
                        return await answer.json()
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0)  # the operator's loops go on; its deadline is above


async def test_without_a_configuration_nothing_listens_and_nothing_is_asked() -> None:
    cluster = Cluster()
    async with cluster.operator() as port:
        assert port == 0
    assert not cluster.api.calls


async def test_the_leader_makes_a_certificate_and_all_answer_with_it() -> None:
    cluster = Cluster()
    async with cluster.operator(**ON) as first, cluster.operator(leading=False, **ON) as second:
        for port in (first, second):
            answer = await cluster.ask(port)
            assert answer["response"]["allowed"] is True
            assert "spec.cache.memory: 8Mi" in answer["response"]["warnings"][0]
    writes = cluster.api.writes()
    assert sum(writes.values()) == 3
