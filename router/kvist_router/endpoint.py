"""The OpenAI endpoint: the relay on its hot paths, FastAPI for the rest. Called by relay_side.py."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvist_connector import names
from kvist_router.access.door import Door
from kvist_router.errors import Refused
from kvist_router.exposition import Exposition, metrics_response
from kvist_router.http_errors import one_error_form
from kvist_router.metrics import RelayMetrics
from kvist_router.mind.interface import Outlook, Refusal
from kvist_router.relay.answers import send_refusal
from kvist_router.relay.app import TENANT, Relay
from kvist_router.relay.paths import PATHS, STORED, route

_OPEN = (names.PATH_HEALTHZ, names.PATH_READYZ)


class Endpoint:
    """ASGI: asks for the API key and dispatches by path before any framework code runs."""

    def __init__(self, relay: Relay, rest: ASGIApp, door: Door, metrics: RelayMetrics) -> None:
        self._relay = relay
        self._rest = rest
        self._door = door
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's request."""
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            try:
                scope[TENANT] = self._door.tenant(scope["headers"])
            except Refused as refused:
                self._metrics.unauthorized.inc()
                await send_refusal(send, refused.refusal, [(b"connection", b"close")])
                return
            if route(scope["path"]) is not None:
                await self._relay(scope, receive, send)
                return
            if scope["path"] == names.PATH_METRICS and self._door.locked:
                await send_refusal(send, _METRICS_ELSEWHERE)
                return
        await self._rest(scope, receive, send)


# They tell of all tenants.
_METRICS_ELSEWHERE = Refusal(404, "with API keys metrics are on the admin port only", code="not_found")


def rest_app(outlook: Outlook, exposition: Exposition) -> FastAPI:
    """`GET /v1/models`, `/healthz`, `/readyz`, `/metrics`; anything else is an OpenAI-form 404."""
    app = FastAPI(title="kvist router", docs_url=None, redoc_url=None, openapi_url=None)
    one_error_form(app, ", ".join((*PATHS, STORED, "/v1/models")))

    @app.get("/v1/models")
    async def models() -> Response:
        cards = [
            {"id": name, "object": "model", "created": 0, "owned_by": "kvist", "max_model_len": longest}
            for name, longest in sorted(outlook.view().models.items())
        ]
        return Response(msgspec.json.encode({"object": "list", "data": cards}), media_type="application/json")

    @app.get(names.PATH_HEALTHZ)
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get(names.PATH_READYZ)
    async def readyz() -> Response:
        problem, degraded = outlook.view().problem, outlook.degraded()
        said = {"status": "not ready", "reason": problem} if problem else {"status": "ready"}
        body = msgspec.json.encode(said | ({"degraded": degraded} if degraded else {}))
        return Response(body, 503 if problem else 200, media_type="application/json")

    @app.get(names.PATH_METRICS)
    async def metrics() -> Response:
        return await metrics_response(exposition)

    return app
