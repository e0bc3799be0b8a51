"""The admin port: decisions, replicas, metrics, controls. Called by mind_side.py; the mind is only read."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import Depends, FastAPI, Query, Request, Response

from kvist_connector import names
from kvist_router.access.guard import Guard
from kvist_router.controls.routes import CONTROLS, ClusterControls, add_controls
from kvist_router.errors import Refused
from kvist_router.explain import add_explain
from kvist_router.exposition import Exposition, metrics_response
from kvist_router.http_errors import one_error_form, refused
from kvist_router.mind.interface import Refusal
from kvist_router.mind.mind import LocalMind
from kvist_router.mind.replica import Replica

MAX_DECISIONS = 1000


def admin_app(mind: LocalMind, exposition: Exposition, controls: ClusterControls, guard: Guard) -> FastAPI:
    """`GET /v1/kvist/decisions[/{id}]`, `/v1/kvist/replicas`, `/metrics`, `/healthz`, controls, explain."""
    app = FastAPI(title="kvist router admin", docs_url=None, redoc_url=None, openapi_url=None)
    one_error_form(
        app,
        ", ".join(
            (
                names.PATH_DECISIONS,
                names.PATH_EXPLAIN,
                names.PATH_REPLICAS,
                names.PATH_POTENTIAL,
                names.PATH_METRICS,
                *CONTROLS,
            )
        ),
    )
    add_controls(app, controls, guard)
    add_explain(app, mind, guard)

    @app.exception_handler(Refused)
    async def not_allowed(_: Request, error: Refused) -> Response:
        return refused(error.refusal, {"WWW-Authenticate": "Bearer"} if error.refusal.status == 401 else None)

    @app.get(names.PATH_DECISIONS, dependencies=[Depends(guard.check)])
    async def decisions(limit: int = Query(default=100, ge=1, le=MAX_DECISIONS)) -> Response:
        return _json({"decisions": mind.records.latest(limit)})

    @app.get(names.PATH_DECISIONS + "/{request_id}", dependencies=[Depends(guard.check)])
    async def decision(request_id: str) -> Response:
        record = mind.records.get(request_id)
        if record is None:
            return refused(_NO_RECORD)
        return _json(record)

    @app.get(names.PATH_REPLICAS, dependencies=[Depends(guard.check_reading)])
    async def replicas() -> Response:
        return _json(
            {
                "replicas": [describe(replica) for replica in mind.replicas.values()],
                "in_flight": len(mind.in_flight),
                "neighbours": mind.neighbours(),
                "local_tokens": {"problem": mind.source.problem},
            }
        )

    @app.get(names.PATH_POTENTIAL)
    async def potential() -> Response:
        return _json(mind.potential.summary())

    @app.get(names.PATH_METRICS)
    async def metrics() -> Response:
        return await metrics_response(exposition)

    @app.get(names.PATH_HEALTHZ)
    async def healthz() -> Response:
        return _json({"status": "ok"})

    return app


def describe(replica: Replica) -> dict[str, Any]:
    """A replica's state in plain data."""
    opening = replica.mirror.opening
    return {
        "name": replica.name,
        "url": replica.url,
        "agent": replica.agent,
        "healthy": replica.healthy,
        "problem": replica.problem,
        "listed_ready": replica.listed_ready,
        "terminating": replica.terminating,
        "draining": replica.draining,
        "behind": replica.behind,
        "breaker": replica.breaker.state,
        "models": sorted(replica.models),
        "mirrored": replica.mirrored(time.monotonic()),
        "trust": {"share": replica.trust.share, "doubted": replica.trust.doubted},
        "feed": {
            "live": replica.feed_live,
            "problem": replica.feed_problem,
            "breaks": replica.feed_breaks,
            "epoch": opening.epoch if opening else None,
            "fingerprint": opening.fingerprint.hex() if opening else "",
            "gpu_known": replica.mirror.gpu_known,
            "gpu_doubted": replica.gpu_doubted,
            "keys": len(replica.mirror),
            "overflow": replica.mirror.overflow,
            "engine_connected": replica.engine_connected,
        },
        "approximate_keys": len(replica.approximate),
        "pending_keys": len(replica.pending),
        "outstanding": {"tokens": replica.outstanding_tokens, "requests": replica.outstanding_requests},
        "elsewhere": {"tokens": replica.elsewhere.tokens, "requests": replica.elsewhere.requests},
        "prefill_seconds_per_token": replica.speeds.prefill.linear,
        "prefill_measured": replica.speeds.measured,  # else a prior
        "correction": replica.speeds.correction,
        "held_seconds": replica.held_seconds,
        "load": msgspec.structs.asdict(replica.load),
    }


_NO_RECORD = Refusal(404, "no decision of this id is kept", code="not_found")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
