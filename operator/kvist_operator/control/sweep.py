"""Finds what a broken watch lost: lists everything from time to time and compares it with the last list.

One list per kind for all clusters, not one per cluster. Called by app.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvist_operator.control.api import Api, Key
from kvist_operator.control.errors import NotFound
from kvist_operator.control.resources import CLUSTERS, MANAGED_SELECTOR, PODS, Object, Resource, managed
from kvist_operator.render.kube.meta import LABEL_INSTANCE

_Seen = Mapping[tuple[Resource, str, str], tuple[str, str]]  # object -> version, its cluster's name


class Sweep:
    """`add` gets each cluster of which anything is new, different or gone; the first time all of them."""

    def __init__(self, api: Api, add: Callable[[Key], object], namespaces: Iterable[str | None]) -> None:
        self._api = api
        self._add = add
        self._namespaces = tuple(namespaces)
        self._seen: _Seen = {}

    async def turn(self, optional: frozenset[str]) -> int:
        """One pass; returns how many clusters were added: all of them when the optional kinds are others."""
        seen = await self._list(optional)
        changed = set(seen.items()) ^ set(self._seen.items())
        keys = {Key(namespace, version[1]) for (_, namespace, _), version in changed}
        self._seen = seen
        for key in sorted(keys, key=str):
            self._add(key)
        return len(keys)

    async def _list(self, optional: frozenset[str]) -> _Seen:
        seen: dict[tuple[Resource, str, str], tuple[str, str]] = {}
        kinds = ",".join(sorted(optional))
        for namespace in self._namespaces:
            for obj in await self._api.list(CLUSTERS, namespace):
                _note(seen, CLUSTERS, obj, obj["metadata"]["name"], kinds)
            for resource in (*managed(optional), PODS):
                for obj in await self._children(resource, namespace):
                    cluster = (obj["metadata"].get("labels") or {}).get(LABEL_INSTANCE)
                    if cluster:
                        _note(seen, resource, obj, cluster)
        return seen

    async def _children(self, resource: Resource, namespace: str | None) -> list[Object]:
        try:
            return await self._api.list(resource, namespace, MANAGED_SELECTOR)
        except NotFound:
            return []  # an optional kind that was just removed


def _note(
    seen: dict[tuple[Resource, str, str], tuple[str, str]],
    resource: Resource,
    obj: Object,
    cluster: str,
    kinds: str = "",
) -> None:
    meta = obj["metadata"]
    seen[resource, meta["namespace"], meta["name"]] = (f"{meta['resourceVersion']} {kinds}", cluster)
