"""Writes the children of a cluster: secrets of its own, server-side apply, prune. Called by reconcile.py.

What to write is decided in changes.py. Programs are first applied as a dry run, so that a template which the
API server refuses changes nothing at all.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvist_operator.control import reasons
from kvist_operator.control.api import Api
from kvist_operator.control.changes import (
    ChildKey,
    Left,
    decide,
    digest,
    finished,
    key_of,
    owned,
    rendered_hash,
)
from kvist_operator.control.errors import Conflict, Invalid
from kvist_operator.control.problems import Problem
from kvist_operator.control.resources import (
    DEPLOYMENTS,
    SECRETS,
    STATEFUL_SETS,
    Object,
    owner_reference,
    resource_of,
)
from kvist_operator.control.snapshot import Snapshot
from kvist_operator.render.kube import GeneratedSecret

_PROGRAMS: Final = (STATEFUL_SETS, DEPLOYMENTS)
TOKEN_BYTES: Final = 32


@dataclass(frozen=True)
class Written:
    """`applied` as the API server answered; `repaired` had been changed by somebody else."""

    applied: Mapping[ChildKey, Object]
    repaired: tuple[ChildKey, ...]
    pruned: tuple[ChildKey, ...]


class Children:
    """`left` is the caller's memory of one cluster's children, written here."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def ensure_secrets(self, raw: Object, wanted: tuple[GeneratedSecret, ...]) -> None:
        """Make the cluster's own Secrets where they are missing; an existing one is never changed."""
        namespace = raw["metadata"]["namespace"]
        for item in wanted:
            if await self._api.get(SECRETS, namespace, item.name) is not None:
                continue
            secret = {
                "apiVersion": SECRETS.api_version,
                "kind": SECRETS.kind,
                "metadata": {
                    "name": item.name,
                    "namespace": namespace,
                    "labels": item.labels,
                    "ownerReferences": [owner_reference(raw)],
                },
                "type": "Opaque",
                "stringData": {item.key: secrets.token_urlsafe(TOKEN_BYTES)},
            }
            try:
                await self._api.create(SECRETS, secret)
            except Conflict:
                continue  # somebody was quicker

    async def write(
        self, snapshot: Snapshot, rendered: tuple[Object, ...], left: dict[ChildKey, Left]
    ) -> Written | Problem:
        """Bring the children to what is rendered; a Problem, and nothing written, where that cannot be."""
        uid = snapshot.raw["metadata"]["uid"]
        wished = finished(rendered, snapshot.namespace, owner_reference(snapshot.raw))
        changes = decide(wished, snapshot.children, left, uid)
        problem = await self._obstacle(changes.apply, snapshot, uid)
        if problem is not None:
            return problem
        applied = await self._apply(changes.apply, left)
        for key in changes.unchanged:
            left[key] = Left(rendered_hash(snapshot.children[key]), digest(snapshot.children[key]))
        for obj in changes.prune:
            await self._api.delete(resource_of(obj), obj)
            left.pop(key_of(obj), None)
        repaired = tuple(
            key
            for key, obj in applied.items()
            if key in snapshot.children and rendered_hash(snapshot.children[key]) == rendered_hash(obj)
        )
        return Written(applied, repaired, tuple(key_of(obj) for obj in changes.prune))

    async def _apply(self, objects: tuple[Object, ...], left: dict[ChildKey, Left]) -> dict[ChildKey, Object]:
        applied = {}
        for obj in objects:
            key = key_of(obj)
            answer = await self._api.apply(key[0], obj)
            left[key] = Left(rendered_hash(obj), digest(answer))
            applied[key] = answer
        return applied

    async def _obstacle(self, objects: tuple[Object, ...], snapshot: Snapshot, uid: str) -> Problem | None:
        """Why these cannot be applied, found out without changing anything."""
        for taken in await asyncio.gather(*(self._taken(key_of(obj), snapshot, uid) for obj in objects)):
            if taken:
                return Problem(reasons.NAME_TAKEN, taken)
        for obj in objects:
            if resource_of(obj) in _PROGRAMS:
                try:
                    await self._api.apply(resource_of(obj), obj, dry_run=True)
                except Invalid as error:
                    return Problem(reasons.REFUSED, str(error))
        return None

    async def _taken(self, key: ChildKey, snapshot: Snapshot, uid: str) -> str:
        """Whose the name is, if it is not ours to use; empty otherwise."""
        resource, name = key
        live = snapshot.child(key)
        labelled = live is not None
        if live is None:
            live = await self._api.get(resource, snapshot.namespace, name)
        if live is None or not _foreign(live, uid, labelled=labelled):
            return ""
        return f"{resource.kind} {name} belongs to another"


def _foreign(live: Object, uid: str, *, labelled: bool) -> bool:
    """Ours are owned by the cluster; one that bears our labels and has no controller is taken in."""
    controlled = any(item.get("controller") for item in live["metadata"].get("ownerReferences") or ())
    if owned({"metadata": {**live["metadata"], "deletionTimestamp": None}}, uid):
        return False
    return controlled or not labelled
