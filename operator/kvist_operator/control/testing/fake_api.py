"""An API server in memory: objects by kind, versions, server-side apply with owned fields, eviction.

Used by tests of the control package. It does no admission and runs no controllers; `reject` stands for the
former, tests write status and pods for the latter. `tests/operator/control/test_api_conformance.py` runs one
suite over it and over a real server.
"""

from __future__ import annotations

import base64
import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvist_operator.control.errors import ApiError, Conflict, Invalid, NotFound, TooMany
from kvist_operator.control.resources import (
    BY_KIND,
    CLUSTERS,
    EVENTS,
    LEASES,
    OPTIONAL_KINDS,
    PODS,
    SECRETS,
    Object,
    Resource,
)
from kvist_operator.control.testing import merge

_Place = tuple[Resource, str, str]
_SYSTEM = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields")


class FakeApi:
    """`optional` are the optional kinds installed; `fail` may hold an error that the next write raises."""

    def __init__(self, optional: Iterable[str] = OPTIONAL_KINDS) -> None:
        known = [r for r in BY_KIND.values() if r.kind not in OPTIONAL_KINDS or r.kind in optional]
        self._resources = {*known, CLUSTERS, PODS, SECRETS, EVENTS, LEASES}
        self._objects: dict[_Place, Object] = {}
        self._owned: dict[tuple[_Place, str], set[merge.Path]] = {}
        self._others: dict[_Place, set[merge.Path]] = {}  # fields that somebody else set, or set too
        self._version = itertools.count(1)
        self.reject: Callable[[Object], str | None] = lambda obj: None
        self.protected: set[str] = set()  # pods that a disruption budget keeps
        self.fail: list[ApiError] = []
        self.on_write: Callable[[str, Resource, Object], None] = lambda verb, resource, obj: None

    # ---- Api

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """As Api."""
        found = self._objects.get((resource, namespace, name))
        return copy.deepcopy(found)

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        """As Api."""
        self._served(resource)
        return [
            copy.deepcopy(obj)
            for (kind, place, _), obj in sorted(self._objects.items())
            if kind == resource and namespace in (None, place) and _matches(obj, labels or {})
            if all(_field(obj, path) == value for path, value in (fields or {}).items())
        ]

    async def apply(
        self, resource: Resource, obj: Object, *, subresource: str = "", dry_run: bool = False
    ) -> Object:
        """As Api."""
        self._check(resource, obj)
        place = _place(resource, obj)
        live = self._objects.get(place)
        if live is None and (subresource or obj["metadata"].get("uid")):
            raise NotFound(f"{resource.plural} {place[2]!r} not found", 404)
        if live is not None:
            _same_uid(live, obj)
        wished = _part(obj, subresource)
        owned, base = merge.leaves(wished), live if live is not None else {"metadata": {}}
        before, others = self._owned.get((place, subresource), set()), self._others.get(place, set())
        result = merge.apply(base, wished, before - owned.keys() - others)
        if dry_run:
            return copy.deepcopy(result)
        self._owned[place, subresource] = set(owned)
        held = merge.leaves(base)
        self._others[place] = {path for path in others if path not in owned or held.get(path) == owned[path]}
        self.on_write("patch", resource, obj)
        return self._store(place, result)

    async def create(self, resource: Resource, obj: Object) -> Object:
        """As Api."""
        self._check(resource, obj)
        place = _place(resource, obj)
        if place in self._objects:
            raise Conflict(f"{resource.plural} {place[2]!r} already exists", 409)
        self.on_write("create", resource, obj)
        return self._store(place, _clean(obj))

    async def replace(self, resource: Resource, obj: Object) -> Object:
        """As Api."""
        self._check(resource, obj)
        place = _place(resource, obj)
        live = self._objects.get(place)
        if live is None:
            raise NotFound(f"{resource.plural} {place[2]!r} not found", 404)
        version = obj["metadata"].get("resourceVersion")
        if version not in (None, live["metadata"]["resourceVersion"]):
            raise Conflict(f"{place[2]!r} has been modified", 409)
        self.on_write("update", resource, obj)
        return self._written_by_other(place, _clean(obj))

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Object, *, subresource: str = ""
    ) -> Object:
        """As Api."""
        self._raise_planned()
        place = (resource, namespace, name)
        live = self._objects.get(place)
        if live is None:
            raise NotFound(f"{resource.plural} {name!r} not found", 404)
        _same_uid(live, patch)
        version = (patch.get("metadata") or {}).get("resourceVersion")
        if version not in (None, live["metadata"]["resourceVersion"]):
            raise Conflict(f"{name!r} has been modified", 409)
        self.on_write("patch", resource, patch)
        return self._written_by_other(place, merge.apply(live, patch, set()))

    async def delete(self, resource: Resource, obj: Object) -> bool:
        """As Api."""
        self._raise_planned()
        place = _place(resource, obj)
        live = self._objects.get(place)
        if live is None:
            return False
        if live["metadata"]["uid"] != obj["metadata"]["uid"]:
            raise Conflict(f"{place[2]!r} is another object by now", 409)
        self.on_write("delete", resource, obj)
        self.ask_to_go(resource, place[1], place[2])
        return True

    async def evict(self, pod: Object) -> bool:
        """As Api."""
        place = _place(PODS, pod)
        live = self._objects.get(place)
        if live is None:
            return False
        if place[2] in self.protected:
            raise TooMany("Cannot evict pod as it would violate the pod's disruption budget.", 429)
        self.on_write("evict", PODS, pod)
        self.remove(PODS, place[1], place[2])
        return True

    async def kinds(self, resource: Resource) -> frozenset[str]:
        """As Api."""
        served = {r for r in self._resources if (r.group, r.version) == (resource.group, resource.version)}
        return frozenset(r.kind for r in served)

    # ---- for tests

    def put(self, resource: Resource, obj: Object) -> Object:
        """Write an object as somebody else, with status and all; returns it as stored."""
        return self._written_by_other(_place(resource, obj), copy.deepcopy(obj))

    def read(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """An object, uncounted."""
        return copy.deepcopy(self._objects.get((resource, namespace, name)))

    def all(self, resource: Resource) -> Sequence[Object]:
        """Every object of a kind."""
        return [copy.deepcopy(obj) for place, obj in sorted(self._objects.items()) if place[0] == resource]

    def ask_to_go(
        self, resource: Resource, namespace: str, name: str, at: str = "2026-01-01T00:00:00Z"
    ) -> None:
        """Delete an object as a person does: one with finalizers waits for them."""
        live = self._objects[resource, namespace, name]
        if not live["metadata"].get("finalizers"):
            self.remove(resource, namespace, name)
        elif not live["metadata"].get("deletionTimestamp"):
            self._store(
                (resource, namespace, name), merge.apply(live, {"metadata": {"deletionTimestamp": at}}, set())
            )

    def remove(self, resource: Resource, namespace: str, name: str) -> None:
        """Delete an object, and what it owns, as the garbage collector does."""
        gone = self._objects.pop((resource, namespace, name))
        self._owned = {key: value for key, value in self._owned.items() if key[0] in self._objects}
        self._others.pop((resource, namespace, name), None)
        uid = gone["metadata"]["uid"]
        for kind, space, child in [place for place, obj in self._objects.items() if _owned_by(obj, uid)]:
            self.remove(kind, space, child)

    def _written_by_other(self, place: _Place, obj: Object) -> Object:
        held = merge.leaves(self._objects.get(place, {}))
        changed = {path for path, value in merge.leaves(obj).items() if held.get(path) != value}
        self._others[place] = self._others.get(place, set()) | changed
        return self._store(place, obj)

    def uninstall(self, resource: Resource) -> None:
        """Remove an optional kind with all of its objects."""
        self._resources.discard(resource)
        for place in [place for place in self._objects if place[0] == resource]:
            self.remove(*place)

    def _served(self, resource: Resource) -> None:
        if resource not in self._resources:
            raise NotFound(f"the server has no {resource.plural}", 404)

    def _check(self, resource: Resource, obj: Object) -> None:
        self._raise_planned()
        self._served(resource)
        if (obj.get("apiVersion"), obj.get("kind")) != (resource.api_version, resource.kind):
            raise Invalid(f"{obj.get('kind')} is not {resource.kind}", 400)
        message = self.reject(obj)
        if message is not None:
            raise Invalid(message, 422)

    def _raise_planned(self) -> None:
        if self.fail:
            raise self.fail.pop(0)

    def _store(self, place: _Place, obj: Object) -> Object:
        live = self._objects.get(place)
        if place[0] == SECRETS:
            _encode(obj)
        meta = obj.setdefault("metadata", {})
        old = live["metadata"] if live is not None else {}
        meta |= {"name": place[2], "namespace": place[1]}
        meta["uid"] = old.get("uid") or f"uid-{next(self._version)}"
        meta.setdefault("creationTimestamp", old.get("creationTimestamp", "2026-01-01T00:00:00Z"))
        for name in ("generation", "resourceVersion"):
            meta.pop(name, None)
        obj.setdefault("apiVersion", place[0].api_version)
        obj.setdefault("kind", place[0].kind)
        if live is not None and _without_versions(live) == _without_versions(obj):
            return copy.deepcopy(live)
        changed = live is None or live.get("spec") != obj.get("spec")
        meta["generation"] = old.get("generation", 0) + (1 if changed else 0)
        meta["resourceVersion"] = str(next(self._version))
        self._objects[place] = obj
        if meta.get("deletionTimestamp") and not meta.get("finalizers"):
            self.remove(*place)
        return copy.deepcopy(obj)


def _place(resource: Resource, obj: Object) -> _Place:
    return resource, obj["metadata"]["namespace"], obj["metadata"]["name"]


def _same_uid(live: Object, given: Object) -> None:
    uid = (given.get("metadata") or {}).get("uid")
    if uid not in (None, live["metadata"]["uid"]):
        raise Conflict(f"uid {uid} is not that of {live['metadata']['name']!r}", 409)


def _encode(secret: Object) -> None:
    """As the server: stringData is for writing only."""
    texts = secret.pop("stringData", None) or {}
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
    if encoded:
        secret["data"] = {**(secret.get("data") or {}), **encoded}


def _part(obj: Object, subresource: str) -> Object:
    """What an apply of the object or of its status can change."""
    if subresource:
        return {"status": copy.deepcopy(obj.get("status", {}))}
    return _clean({name: value for name, value in obj.items() if name != "status"})


def _clean(obj: Object) -> Object:
    result = copy.deepcopy(obj)
    for name in _SYSTEM:
        result["metadata"].pop(name, None)
    return result


def _without_versions(obj: Object) -> Object:
    meta = {k: v for k, v in obj["metadata"].items() if k not in ("generation", "resourceVersion")}
    return {**obj, "metadata": meta}


def _matches(obj: Object, labels: Mapping[str, str]) -> bool:
    own: Mapping[str, Any] = obj["metadata"].get("labels") or {}
    return all(own.get(name) == value for name, value in labels.items())


def _field(obj: Object, path: str) -> Any:
    found: Any = obj
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _owned_by(obj: Object, uid: str) -> bool:
    return any(reference["uid"] == uid for reference in obj["metadata"].get("ownerReferences") or ())
