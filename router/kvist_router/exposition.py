"""Metrics in Prometheus' text form, of one process or of all of the router's. Called by both ports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

Exposition = Callable[[], Awaitable[bytes]]


def exposition_of(registry: CollectorRegistry) -> Exposition:
    """Of one process."""

    async def text() -> bytes:
        return generate_latest(registry)

    return text


async def metrics_response(exposition: Exposition) -> Response:
    """The answer to a scrape."""
    try:
        return Response(await exposition(), media_type=CONTENT_TYPE_LATEST)
    except TimeoutError:
        return Response("the router's processes did not answer in time\n", 503, media_type="text/plain")
