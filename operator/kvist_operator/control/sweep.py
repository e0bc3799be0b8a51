"""Finds what a broken watch lost: lists everything from time to time and compares it with the last list.

One list per kind for all clusters, not one per cluster. Called by app.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from kvist_operator.control.api import Api, Key
from kvist_operator.control.errors import ApiError, Forbidden, NotFound
from kvist_operator.control.resources import CLUSTERS, MANAGED_SELECTOR, PODS, Object, Resource, managed
from kvist_operator.render.kube.meta import LABEL_INSTANCE

_log = logging.getLogger(__name__)
_Seen = Mapping[tuple[Resource, str, str], tuple[str, str]]  # object -> version, its cluster's name


class Sweep:
    """`add` gets each cluster of which anything is new, different or gone; the first time all of them.

    Namespaces are listed each by itself: one that cannot be listed stays as it was last seen, is logged once,
    and `unlisted` tells how many there are.
    """

    def __init__(self, api: Api, add: Callable[[Key], object], namespaces: Iterable[str | None]) -> None:
        self._api = api
        self._add = add
        self._seen: dict[str | None, _Seen] = {namespace: {} for namespace in namespaces}
        self._refused: dict[str | None, ApiError] = {}

    @property
    def unlisted(self) -> int:
        """Namespaces that could not be listed at the last pass."""
        return len(self._refused)

    async def turn(self, optional: frozenset[str]) -> int:
        """One pass; returns how many clusters were added: all of them when the optional kinds are others.

        Raises ApiError, after all else is done, when no namespace can be listed or the server had no answer.
        """
        changed: set[Key] = set()
        for namespace in self._seen:
            changed |= await self._look(namespace, optional)
        for key in sorted(changed, key=str):
            self._add(key)
        errors = list(self._refused.values())
        passing = [error for error in errors if not isinstance(error, Forbidden | NotFound)]
        if errors and (passing or len(errors) == len(self._seen)):
            raise (passing or errors)[0]
        return len(changed)

    async def _look(self, namespace: str | None, optional: frozenset[str]) -> set[Key]:
        """Clusters of one namespace that changed since the last look."""
        try:
            seen = await self._list(namespace, optional)
        except ApiError as error:
            if namespace not in self._refused:
                _log.warning("namespace %s cannot be listed: %s", namespace or "(all)", error)
            self._refused[namespace] = error
            return set()
        if self._refused.pop(namespace, None) is not None:
            _log.info("namespace %s can be listed again", namespace or "(all)")
        changed = set(seen.items()) ^ set(self._seen[namespace].items())
        self._seen[namespace] = seen
        return {Key(place, version[1]) for (_, place, _), version in changed}

    async def _list(self, namespace: str | None, optional: frozenset[str]) -> _Seen:
        seen: dict[tuple[Resource, str, str], tuple[str, str]] = {}
        kinds = ",".join(sorted(optional))
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
