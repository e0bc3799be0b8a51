"""Counts the calls of another `Api` by verb and resource, as RBAC names them.

The composition root wraps the real client in it; the figures are metrics, and a test compares them
with the role of the chart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from kvist_operator.control.api import Api
from kvist_operator.control.resources import PODS, Object, Resource

READS = frozenset({"get", "list"})
Call = tuple[str, str, str]  # verb, group, resource/subresource


class CountedApi:
    """`calls` grows with the kinds there are, not with objects. `seen` is told of each call."""

    def __init__(self, inner: Api, seen: Callable[[Call], None] = lambda call: None) -> None:
        self._inner = inner
        self._seen = seen
        self.calls: Counter[Call] = Counter()

    def writes(self) -> Counter[Call]:
        """Calls that change something."""
        return Counter({call: count for call, count in self.calls.items() if call[0] not in READS})

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """As Api."""
        self._count("get", resource)
        return await self._inner.get(resource, namespace, name)

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        """As Api."""
        self._count("list", resource)
        return await self._inner.list(resource, namespace, labels, fields)

    async def apply(
        self, resource: Resource, obj: Object, *, subresource: str = "", dry_run: bool = False
    ) -> Object:
        """As Api."""
        self._count("patch", resource, subresource)
        return await self._inner.apply(resource, obj, subresource=subresource, dry_run=dry_run)

    async def create(self, resource: Resource, obj: Object) -> Object:
        """As Api."""
        self._count("create", resource)
        return await self._inner.create(resource, obj)

    async def replace(self, resource: Resource, obj: Object) -> Object:
        """As Api."""
        self._count("update", resource)
        return await self._inner.replace(resource, obj)

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Object, *, subresource: str = ""
    ) -> Object:
        """As Api."""
        self._count("patch", resource, subresource)
        return await self._inner.patch(resource, namespace, name, patch, subresource=subresource)

    async def delete(self, resource: Resource, obj: Object) -> bool:
        """As Api."""
        self._count("delete", resource)
        return await self._inner.delete(resource, obj)

    async def evict(self, pod: Object) -> bool:
        """As Api."""
        self._count("create", PODS, "eviction")
        return await self._inner.evict(pod)

    async def kinds(self, resource: Resource) -> frozenset[str]:
        """As Api; discovery needs no right of its own and is not counted."""
        return await self._inner.kinds(resource)

    def _count(self, verb: str, resource: Resource, subresource: str = "") -> None:
        plural = f"{resource.plural}/{subresource}" if subresource else resource.plural
        call = (verb, resource.group, plural)
        self.calls[call] += 1
        self._seen(call)
