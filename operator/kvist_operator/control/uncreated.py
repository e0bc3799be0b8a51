"""Why StatefulSets have fewer pods than they want, in their controller's words. Called by gather.py.

A StatefulSet has no condition for it: quota, Pod Security and missing service accounts are told in events.
Nothing is asked while all pods are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kvist_operator.control.api import Api
from kvist_operator.control.resources import EVENTS, STATEFUL_SETS, Object

FAILED_CREATE: Final = "FailedCreate"


async def creation_failures(
    api: Api, namespace: str, children: Iterable[Object], pods: Iterable[Object]
) -> dict[str, str]:
    """Name of a StatefulSet that lacks pods -> the last refusal, if it is about those. Raises ApiError."""
    listed = list(pods)
    found = {}
    for owner in _lacking(children, listed):
        meta = owner["metadata"]
        fields = {"involvedObject.uid": meta["uid"], "reason": FAILED_CREATE}
        message = refusal(await api.list(EVENTS, namespace, fields=fields), _owned(listed, meta["uid"]))
        if message:
            found[meta["name"]] = message
    return found


def refusal(events: Iterable[Object], pods: Iterable[Object]) -> str:
    """The latest event's message; a pod made after it shows that it is no longer true. Pure."""
    last = max(events, key=_told, default=None)
    made = max((str(pod["metadata"].get("creationTimestamp") or "") for pod in pods), default="")
    return str(last.get("message") or "") if last is not None and _told(last) >= made else ""


def _told(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")


def _lacking(children: Iterable[Object], pods: list[Object]) -> Iterator[Object]:
    for obj in children:
        if obj.get("kind") == STATEFUL_SETS.kind:
            wanted = int(obj["spec"].get("replicas", 1))
            if len(_owned(pods, obj["metadata"]["uid"])) < wanted:
                yield obj


def _owned(pods: Iterable[Object], uid: str) -> list[Object]:
    return [
        pod
        for pod in pods
        if any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences") or ())
    ]
