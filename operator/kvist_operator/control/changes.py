"""What has to be written so that the children of a cluster are as rendered. Pure.

Called by apply.py with what the API server holds. An object is left alone when the hash in its annotation
is that of the rendering and either it is just as this operator last left it, or everything rendered is in it.
So nothing is written when nothing changed, a change by hand is undone, and fields that others own are theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.control.resources import BY_KIND, Object, Resource, resource_of
from kvist_operator.render.kube import meta

HASH_ANNOTATION: Final = "kvist.dev/rendered"
ChildKey = tuple[Resource, str]  # kind and name; the namespace is the cluster's


@dataclass(frozen=True)
class Left:
    """How this operator last left a child: hash of the rendering, digest of the object as answered."""

    rendered: str
    live: str


@dataclass(frozen=True)
class Changes:
    """Objects to write, objects to delete, and what stays as it is."""

    apply: tuple[Object, ...] = ()
    prune: tuple[Object, ...] = ()
    unchanged: tuple[ChildKey, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing is to be written."""
        return not self.apply and not self.prune


def finished(rendered: Iterable[Object], namespace: str, owner: Object) -> tuple[Object, ...]:
    """Renderings as they are applied: namespace, owner and hash added; in the order of kinds to apply."""
    done = [_finish(obj, namespace, owner) for obj in rendered]
    order = {resource: at for at, resource in enumerate(BY_KIND.values())}
    return tuple(sorted(done, key=lambda obj: (order[resource_of(obj)], obj["metadata"]["name"])))


def decide(
    wished: Iterable[Object],
    live: Mapping[ChildKey, Object],
    left: Mapping[ChildKey, Left],
    owner_uid: str,
) -> Changes:
    """`live` holds the labelled children there are, of every managed kind."""
    apply, unchanged, names = [], [], set()
    for obj in wished:
        key = key_of(obj)
        names.add(key)
        if _current(obj, live.get(key), left.get(key)):
            unchanged.append(key)
        else:
            apply.append(obj)
    prune = [obj for key, obj in live.items() if key not in names and owned(obj, owner_uid)]
    return Changes(tuple(apply), tuple(prune), tuple(unchanged))


def key_of(obj: Mapping[str, Any]) -> ChildKey:
    """Kind and name of an object."""
    return resource_of(obj), str(obj["metadata"]["name"])


def owned(obj: Mapping[str, Any], uid: str) -> bool:
    """Whether the object belongs to the cluster with this uid, and is not going already."""
    metadata = obj["metadata"]
    references = metadata.get("ownerReferences") or ()
    return not metadata.get("deletionTimestamp") and any(r.get("uid") == uid for r in references)


def rendered_hash(obj: Mapping[str, Any]) -> str:
    """The hash in the annotation of a finished or live object; empty without one."""
    return str((obj["metadata"].get("annotations") or {}).get(HASH_ANNOTATION, ""))


def digest(obj: Mapping[str, Any]) -> str:
    """Of everything but status and what the server counts: a change here is a change of the object."""
    kept = {name: obj["metadata"].get(name) for name in ("labels", "annotations", "ownerReferences")}
    rest = {name: value for name, value in obj.items() if name not in ("metadata", "status")}
    return meta.digest({"metadata": kept, **rest})


def contained(wished: Any, live: Any) -> bool:
    """Whether every field of `wished` has that value in `live`; lists item by item."""
    if isinstance(wished, dict):
        return isinstance(live, dict) and all(
            name in live and contained(value, live[name]) for name, value in wished.items()
        )
    if isinstance(wished, list):
        same = isinstance(live, list) and len(wished) == len(live)
        return same and all(contained(a, b) for a, b in zip(wished, live, strict=True))
    return bool(wished == live)


def _current(wished: Object, live: Object | None, left: Left | None) -> bool:
    if live is None or rendered_hash(live) != rendered_hash(wished):
        return False
    if left == Left(rendered_hash(wished), digest(live)):
        return True
    return contained(wished, live)


def _finish(obj: Object, namespace: str, owner: Object) -> Object:
    result = copy.deepcopy(obj)
    metadata = result["metadata"]
    metadata["namespace"] = namespace
    metadata["ownerReferences"] = [owner]
    metadata["annotations"] = {**(metadata.get("annotations") or {}), HASH_ANNOTATION: meta.digest(obj)}
    return result
