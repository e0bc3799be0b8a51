"""Lets an `Api` write only while the lease is certainly held.

Reconciliation gets the fenced client, the lease the bare one. A write also ends before the lease
could pass to another operator, so two never act at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from kvist_operator.control.api import Api
from kvist_operator.control.errors import NotLeader
from kvist_operator.control.resources import Object, Resource

T = TypeVar("T")


class FencedApi:
    """`remaining` says for how many seconds the lease is certainly held; 0 or less: not."""

    def __init__(self, inner: Api, remaining: Callable[[], float]) -> None:
        self._inner = inner
        self._remaining = remaining

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """As Api."""
        return await self._inner.get(resource, namespace, name)

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        """As Api."""
        return await self._inner.list(resource, namespace, labels, fields)

    async def apply(
        self, resource: Resource, obj: Object, *, subresource: str = "", dry_run: bool = False
    ) -> Object:
        """As Api, or NotLeader."""
        call = self._inner.apply
        return await self._write(lambda: call(resource, obj, subresource=subresource, dry_run=dry_run))

    async def create(self, resource: Resource, obj: Object) -> Object:
        """As Api, or NotLeader."""
        return await self._write(lambda: self._inner.create(resource, obj))

    async def replace(self, resource: Resource, obj: Object) -> Object:
        """As Api, or NotLeader."""
        return await self._write(lambda: self._inner.replace(resource, obj))

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Object, *, subresource: str = ""
    ) -> Object:
        """As Api, or NotLeader."""
        call = self._inner.patch
        return await self._write(lambda: call(resource, namespace, name, patch, subresource=subresource))

    async def delete(self, resource: Resource, obj: Object) -> bool:
        """As Api, or NotLeader."""
        return await self._write(lambda: self._inner.delete(resource, obj))

    async def evict(self, pod: Object) -> bool:
        """As Api, or NotLeader."""
        return await self._write(lambda: self._inner.evict(pod))

    async def kinds(self, resource: Resource) -> frozenset[str]:
        """As Api."""
        return await self._inner.kinds(resource)

    async def _write(self, call: Callable[[], Awaitable[T]]) -> T:
        remaining = self._remaining()
        if remaining <= 0:
            raise NotLeader("the lease is not held")
        try:
            async with asyncio.timeout(remaining):
                return await call()
        except TimeoutError as error:
            raise NotLeader("the lease ended during a write") from error
