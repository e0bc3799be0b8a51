"""`Api` over HTTP to a real API server. Built by app.py and by the conformance suite.

Objects stay plain dicts, so a lean client does: no model classes, one connection pool, one deadline a call.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, Self

import aiohttp
import kopf

from kvist_operator.control.errors import ApiError, NotFound, Unavailable, from_status
from kvist_operator.control.resources import CLUSTERS, PODS, Object, Resource
from kvist_operator.render.kube.meta import MANAGER

_APPLY: Final = "application/apply-patch+yaml"  # JSON is YAML
_STRATEGIC: Final = "application/strategic-merge-patch+json"
_MERGE: Final = "application/merge-patch+json"
_JSON: Final = "application/json"
PAGE: Final = "500"
RELOGIN_SECONDS: Final = 30.0


class RestApi:
    """An async context manager. `deadline` is for one call, a page of a list counts as one."""

    def __init__(
        self, login: Callable[[], kopf.ConnectionInfo], deadline: float = 15.0, connections: int = 32
    ) -> None:
        self._login = login
        self._deadline = deadline
        self._connections = connections
        self._info = login()
        self._checked = time.monotonic()
        self._tls: ssl.SSLContext | bool = True
        self._stack = AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Opens no connection yet."""
        self._tls = await asyncio.to_thread(self._info.as_ssl_context)
        connector = aiohttp.TCPConnector(limit=self._connections)
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, headers={"User-Agent": MANAGER}, trust_env=False)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the connections."""
        await self._stack.aclose()

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """As Api."""
        try:
            return await self._call("GET", resource.path(namespace, name))
        except NotFound:
            return None

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        """As Api."""
        query = {"limit": PAGE}
        for selector, wanted in (("labelSelector", labels), ("fieldSelector", fields)):
            if wanted:
                query[selector] = ",".join(f"{name}={value}" for name, value in sorted(wanted.items()))
        found: list[Object] = []
        while True:
            page = await self._call("GET", resource.path(namespace), query)
            found += page["items"]
            token = page["metadata"].get("continue")
            if not token:
                break
            query["continue"] = token
        named = {"apiVersion": resource.api_version, "kind": resource.kind}
        return [named | item for item in found]

    async def apply(
        self, resource: Resource, obj: Object, *, subresource: str = "", dry_run: bool = False
    ) -> Object:
        """As Api."""
        query = {"fieldManager": MANAGER, "force": "true"}
        if dry_run:
            query["dryRun"] = "All"
        path = _path(resource, obj, subresource)
        return await self._call("PATCH", path, query, obj, _APPLY)

    async def create(self, resource: Resource, obj: Object) -> Object:
        """As Api."""
        path = resource.path(obj["metadata"]["namespace"])
        return await self._call("POST", path, {"fieldManager": MANAGER}, obj)

    async def replace(self, resource: Resource, obj: Object) -> Object:
        """As Api."""
        return await self._call("PUT", _path(resource, obj), {"fieldManager": MANAGER}, obj)

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Object, *, subresource: str = ""
    ) -> Object:
        """As Api."""
        path = resource.path(namespace, name, subresource)
        plain = resource.group == CLUSTERS.group or subresource == "scale"  # custom kinds know no other
        content = _MERGE if plain else _STRATEGIC
        return await self._call("PATCH", path, {"fieldManager": MANAGER}, patch, content)

    async def delete(self, resource: Resource, obj: Object) -> bool:
        """As Api."""
        options = {"preconditions": {"uid": obj["metadata"]["uid"]}, "propagationPolicy": "Background"}
        try:
            await self._call("DELETE", _path(resource, obj), body=options)
        except NotFound:
            return False
        return True

    async def evict(self, pod: Object) -> bool:
        """As Api."""
        meta = pod["metadata"]
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
            "deleteOptions": {"preconditions": {"uid": meta["uid"]}},
        }
        try:
            await self._call("POST", _path(PODS, pod, "eviction"), body=body)
        except NotFound:
            return False
        return True

    async def kinds(self, resource: Resource) -> frozenset[str]:
        """As Api."""
        try:
            found = await self._call("GET", resource.root)
        except NotFound:
            return frozenset()
        return frozenset(item["kind"] for item in found["resources"] if "/" not in item["name"])

    async def raw(self, method: str, path: str, body: Object | None = None) -> Object:
        """Any other call, for tests and benches: namespaces are none of the operator's business."""
        return await self._call(method, path, body=body)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = _JSON,
    ) -> Object:
        if self._session is None:
            raise Unavailable("the client is closed")
        await self._fresh_login()
        headers = {**self._info.as_http_headers(), "Accept": _JSON, "Content-Type": content}
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        url = self._info.server.rstrip("/") + path
        try:
            async with (
                asyncio.timeout(self._deadline),
                self._session.request(
                    method, url, params=query, data=data, headers=headers, ssl=self._tls
                ) as answer,
            ):
                payload = await answer.read()
        except TimeoutError as error:
            raise Unavailable(f"{method} {path}: no answer within {self._deadline:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{method} {path}: {str(error) or type(error).__name__}") from error
        return _parsed(answer.status, payload, f"{method} {path}")

    async def _fresh_login(self) -> None:
        """Tokens of service accounts are replaced in their file, certificates in the kubeconfig."""
        now = time.monotonic()
        if now - self._checked < RELOGIN_SECONDS:
            return
        self._checked = now
        found = await asyncio.to_thread(self._login)
        if found != self._info:
            self._tls = await asyncio.to_thread(found.as_ssl_context)
            self._info = found


def _path(resource: Resource, obj: Object, subresource: str = "") -> str:
    return resource.path(obj["metadata"]["namespace"], obj["metadata"]["name"], subresource)


def _another(body: Any) -> bool:
    """A patch with the uid of an object that is gone: the server calls it a change of the uid."""
    causes = (body.get("details") or {}).get("causes") if isinstance(body, dict) else None
    return any(cause.get("field") == "metadata.uid" for cause in causes or ())


def _parsed(status: int, payload: bytes, what: str) -> Object:
    try:
        body: Any = json.loads(payload)
    except ValueError:
        body = None
    if status >= 300:
        said = body.get("message") if isinstance(body, dict) else None
        raise from_status(409 if _another(body) else status, str(said or f"{what}: HTTP {status}"))
    if not isinstance(body, dict):
        raise ApiError(f"{what}: the answer is not a JSON object", status)
    return body
