"""`POST /v1/kvist/explain` on the admin port: what the router would do with a request, and why.

The body is the OpenAI request, byte for byte; `?path=chat|completions` and `?tenant=` stand for its path and
header. The answer is a decision record; nothing is sent, counted or kept. It tells what others have cached,
so it is guarded like the controls. Called by admin.py.
"""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import FastAPI, Query, Request, Response

from kvist_connector import names
from kvist_router.access.guard import Guard
from kvist_router.errors import Refused
from kvist_router.http_errors import refused
from kvist_router.mind.interface import Metadata, Path, Refusal
from kvist_router.mind.mind import LocalMind
from kvist_router.relay.body import ClientGone, read_body

MAX_BODY = 16 * 2**20
DEADLINE_SECONDS = 30.0
_LATE = Refusal(504, f"no decision within {DEADLINE_SECONDS:g} s")


def add_explain(app: FastAPI, mind: LocalMind, guard: Guard) -> None:
    """Serve it."""

    @app.post(names.PATH_EXPLAIN)
    async def explain(request: Request, path: Path = "chat", tenant: str = Query(default="")) -> Response:
        try:
            await guard.check(request)
            async with asyncio.timeout(DEADLINE_SECONDS):
                body = await read_body(request.receive, request.scope["headers"], MAX_BODY)
                found = await mind.explain(body, Metadata(path, tenant))
        except Refused as error:
            return refused(error.refusal)
        except (TimeoutError, ClientGone):
            return refused(_LATE)
        if isinstance(found, Refusal):
            return refused(found)
        return Response(msgspec.json.encode(found), media_type="application/json")
