"""The API server as the operator sees it: one interface over plain dicts.

`rest.py` speaks to a real server, `testing/fake_api.py` is one in memory; tests/operator/control runs one
suite over both. Wrappers: `counted.py` (calls per verb and resource), `fenced.py` (no write without lease).
Every call has a deadline and raises `ApiError`; reading what is not there is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvist_operator.control.resources import Object, Resource


@dataclass(frozen=True)
class Key:
    """Namespace and name of a CacheCluster: what the queue holds."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Api(Protocol):
    """`namespace` None lists over all namespaces."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """The object, None when it or its kind is not there."""
        ...

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        """All objects with these labels and fields (as field selectors name them), each with apiVersion and
        kind; a missing kind is NotFound."""
        ...

    async def apply(
        self, resource: Resource, obj: Object, *, subresource: str = "", dry_run: bool = False
    ) -> Object:
        """Server-side apply, forced, under the one field manager. With metadata.uid only that very object."""
        ...

    async def create(self, resource: Resource, obj: Object) -> Object:
        """POST; Conflict when the name is taken."""
        ...

    async def replace(self, resource: Resource, obj: Object) -> Object:
        """PUT; with metadata.resourceVersion Conflict unless it is still that version."""
        ...

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Object, *, subresource: str = ""
    ) -> Object:
        """JSON merge patch, strategic for built-in kinds: lists with merge keys are merged."""
        ...

    async def delete(self, resource: Resource, obj: Object) -> bool:
        """Delete this very object (uid); False when it is gone already."""
        ...

    async def evict(self, pod: Object) -> bool:
        """Evict this very pod; False when it is gone, TooMany when a disruption budget refuses."""
        ...

    async def kinds(self, resource: Resource) -> frozenset[str]:
        """Kinds served under the resource's group and version; empty when there is none."""
        ...
