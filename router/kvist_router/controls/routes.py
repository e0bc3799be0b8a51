"""`POST /v1/kvist/lookup` and the other controls on the admin port, for all replicas or some.

Bodies are those of the agents, and texts, messages, a tenant and names of replicas beside them. Answers
have each replica's own, the sums, and `incomplete`: who did not do it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from kvist_connector import names
from kvist_connector.protocol.audit import shown
from kvist_connector.protocol.tiers import Tier
from kvist_router.access.guard import Guard
from kvist_router.controls.fanout import FanOut
from kvist_router.controls.moving import Mover
from kvist_router.controls.selection import Selections, wrong
from kvist_router.controls.spread import Spreader
from kvist_router.errors import Refused
from kvist_router.http_errors import refused
from kvist_router.mind.interface import Refusal
from kvist_router.mind.replica import Replica

MAX_BODY = 64 * 2**20
CONTROLS = (
    names.PATH_LOOKUP,
    names.PATH_PIN,
    names.PATH_UNPIN,
    names.PATH_CLEAR,
    names.PATH_PREFETCH,
    names.PATH_MOVE,
    names.PATH_COMPRESS,
    names.PATH_DECOMPRESS,
    names.PATH_RETIRE,
)
_TIERS = tuple(tier.label for tier in Tier)
_TARGETS = tuple(tier.label for tier in (Tier.MEMORY, Tier.DISK, Tier.REDIS, Tier.OBJECT))
_SUMS = ("chunks", "tokens", "bytes")
_audit = logging.getLogger("kvist.audit")


@dataclass(frozen=True)
class ClusterControls:
    """Of one router."""

    replicas: dict[str, Replica]
    fanout: FanOut
    selections: Selections
    spreader: Spreader
    mover: Mover

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of the whole cluster; raises Refused."""
        chosen = self._chosen(body.get("replicas"))
        sent = await self.selections.resolve(body)
        if path == names.PATH_RETIRE:
            return await self._retire(chosen, sent)
        if path == names.PATH_MOVE and sent.get("to") not in _TIERS:
            target = self._target(sent.get("to"))
            sources = [replica for replica in chosen if replica is not target]
            return _together(await self.mover.move(sources, target, sent))
        return _together(await self.fanout.ask(chosen, path, sent))

    async def _retire(self, chosen: list[Replica], sent: dict[str, Any]) -> dict[str, Any]:
        if len(chosen) != len(self.replicas):
            raise wrong("a retirement is for every replica", "replicas")
        epoch = self.spreader.next_epoch()
        answers = await self.fanout.ask(chosen, names.PATH_RETIRE, sent | {"epoch": epoch})
        if not sent.get("dry_run"):
            for replica in chosen:
                if "rule" in answers[replica.name]:
                    self.spreader.took(replica, answers[replica.name])
            self.spreader.judge()
        return _together(answers) | {"epoch": epoch}

    def _target(self, name: object) -> Replica:
        found = self.replicas.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join((*_TARGETS, *sorted(self.replicas)))
            raise wrong(f"to: {name!r} is neither a tier nor a replica; valid: {known}", "to")
        return found

    def _chosen(self, wanted: object) -> list[Replica]:
        if wanted is None:
            return list(self.replicas.values())
        listed = wanted if isinstance(wanted, list) else [None]
        found = [self.replicas.get(name) if isinstance(name, str) else None for name in listed]
        chosen = [replica for replica in found if replica is not None]
        if len(chosen) != len(found):
            raise wrong(f"replicas must be a list of {', '.join(sorted(self.replicas))}", "replicas")
        return chosen


def add_controls(app: FastAPI, controls: ClusterControls, guard: Guard) -> None:
    """Serve the controls."""

    def serve(path: str) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            try:
                await guard.check(request)
                body = await _body(request)
                answer = await controls.ask(path, body)
            except Refused as error:
                return refused(error.refusal)
            if path != names.PATH_LOOKUP and not body.get("dry_run"):
                audit(path, request, body, answer)
            return Response(msgspec.json.encode(answer), media_type="application/json")

        return handle

    for path in CONTROLS:
        app.post(path)(serve(path))


def audit(path: str, request: Request, body: dict[str, Any], answer: dict[str, Any]) -> None:
    """One line for each change; without prompts."""
    asked = {
        name: value for name, value in body.items() if name not in ("tokens", "text", "messages", "keys")
    }
    line = {
        "action": path.rpartition("/")[2],
        "remote": request.client.host if request.client is not None else "",
        "asked": shown(asked),
        "answer": shown({name: value for name, value in answer.items() if name != "replicas"}),
    }
    _audit.info("%s", msgspec.json.encode(line).decode())


def _together(answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    incomplete = [
        name for name, answer in answers.items() if "error" in answer or answer.get("complete") is False
    ]
    sums = {
        field: sum(int(answer[field]) for answer in answers.values() if isinstance(answer.get(field), int))
        for field in _SUMS
    }
    return {"replicas": answers, "incomplete": incomplete, **sums}


async def _body(request: Request) -> dict[str, Any]:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY:
            raise Refused(Refusal(413, f"the body is longer than {MAX_BODY} bytes"))
    try:
        body = msgspec.json.decode(data or b"{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise wrong(f"the body is not JSON: {error}", "body") from error
    if not isinstance(body, dict):
        raise wrong("the body must be a JSON object", "body")
    return body
