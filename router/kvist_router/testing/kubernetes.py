"""A stand-in for a Kubernetes API server: EndpointSlices of a namespace, list and watch.

What it does is what tests/router/test_discovery.py also asks of a real one: versions that grow, events
after a version, bookmarks, 410 for versions that are gone, bearer tokens.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from kvist_router.testing.server import LocalServer

Object = dict[str, Any]


class FakeKubernetes(LocalServer):
    """`put` and `drop` change slices; `forget` makes old versions unknown; `refuse` answers a status."""

    def __init__(self, token: str = "") -> None:
        super().__init__()
        self.token = token
        self.refuse = 0
        self.lists = self.watches = 0
        self._version = 100
        self._oldest = 0
        self._slices: dict[tuple[str, str], Object] = {}
        self._events: list[tuple[int, str, Object]] = []
        self._news = asyncio.Condition()

    def application(self) -> web.Application:
        """See LocalServer."""
        app = web.Application()
        app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", self._get)
        return app

    async def put(self, namespace: str, item: Object) -> None:
        """Create or replace a slice."""
        key = namespace, item["metadata"]["name"]
        kind = "MODIFIED" if key in self._slices else "ADDED"
        self._slices[key] = await self._happened(kind, namespace, item)

    async def drop(self, namespace: str, name: str) -> None:
        """Delete a slice."""
        await self._happened("DELETED", namespace, self._slices.pop((namespace, name)))

    async def bookmark(self) -> None:
        """Tell the present version to those that watch."""
        async with self._news:
            self._version += 1
            item = {"metadata": {"resourceVersion": str(self._version)}}
            self._events.append((self._version, "BOOKMARK", item))
            self._news.notify_all()

    async def forget(self) -> None:
        """Compact: versions before now are gone, watches from them end."""
        async with self._news:
            self._version += 1
            self._oldest = self._version
            self._events.clear()
            self._news.notify_all()

    async def end_watches(self) -> None:
        """End all connections, as a server that restarts; the port stays the same."""
        await self.stop()
        await self.start()

    async def _happened(self, kind: str, namespace: str, item: Object) -> Object:
        async with self._news:
            self._version += 1
            metadata = {**item["metadata"], "namespace": namespace, "resourceVersion": str(self._version)}
            kept = {**item, "metadata": metadata}
            self._events.append((self._version, kind, kept))
            self._news.notify_all()
            return kept

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if self.refuse:
            return _status(self.refuse, "refused by the test")
        namespace = request.match_info["namespace"]
        label, _, value = request.query.get("labelSelector", "").partition("=")
        if request.query.get("watch") == "1":
            return await self._watch(request, namespace, label, value)
        self.lists += 1
        items = [item for (where, _), item in self._slices.items() if where == namespace]
        return web.json_response({
            "kind": "EndpointSliceList",
            "metadata": {"resourceVersion": str(self._version)},
            "items": [item for item in items if _matches(item, label, value)],
        })  # fmt: skip

    async def _watch(
        self, request: web.Request, namespace: str, label: str, value: str
    ) -> web.StreamResponse:
        self.watches += 1
        seen = int(request.query["resourceVersion"])
        until = asyncio.get_running_loop().time() + int(request.query.get("timeoutSeconds", "60"))
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        while True:
            if seen < self._oldest:
                await response.write(_line("ERROR", {"code": 410, "message": "too old resource version"}))
                return response
            for version, kind, item in [event for event in self._events if event[0] > seen]:
                seen = version
                ours = item["metadata"].get("namespace") == namespace and _matches(item, label, value)
                if ours or (kind == "BOOKMARK" and request.query.get("allowWatchBookmarks") == "true"):
                    await response.write(_line(kind, item))
            if not await self._more(seen, until):
                return response

    async def _more(self, seen: int, until: float) -> bool:
        async with self._news:
            try:
                async with asyncio.timeout_at(until):
                    await self._news.wait_for(lambda: self._version > seen)
            except TimeoutError:
                return False
        return True


def _matches(item: Object, label: str, value: str) -> bool:
    return not label or item["metadata"].get("labels", {}).get(label) == value


def _line(kind: str, item: Object) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)
