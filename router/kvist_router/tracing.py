"""OpenTelemetry: one span for each request, and the engine's spans below it. Imported only when switched on.

Called by app.py. The trace of the client goes on, or one begins; the engine gets `traceparent` with this
span. No text of a prompt is in a span. A thread of the library sends them; without a collector they are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvist_connector import names
from kvist_router.relay.app import TENANT
from kvist_router.relay.paths import PATHS, STORED, route

_CARRIED: Final = (b"traceparent", b"tracestate")
_QUIET: Final = (names.PATH_HEALTHZ, names.PATH_READYZ, names.PATH_METRICS)
_SEND_SECONDS: Final = 5.0


@asynccontextmanager
async def tracing(endpoint: str, ratio: float, name: str) -> AsyncIterator[Tracer]:
    """A tracer that sends to a collector; what is left is sent at the end."""
    resource = Resource({"service.name": "kvist-router", "service.instance.id": name})
    sampler = ParentBased(TraceIdRatioBased(ratio))
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_SECONDS))
    )
    try:
        yield provider.get_tracer("kvist_router", version("kvist"))
    finally:
        await asyncio.to_thread(provider.shutdown)


class Traced:
    """ASGI around the endpoint."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["path"] in _QUIET:
            await self._app(scope, receive, send)
            return
        span = self._begin(scope)
        watched = _Watched(span, send)
        try:
            await self._app(scope, receive, watched)
        finally:
            watched.end(scope)

    def _begin(self, scope: Scope) -> Span:
        carrier = {
            key.decode(): value.decode("latin-1") for key, value in scope["headers"] if key in _CARRIED
        }
        span = self._tracer.start_span(
            f"{scope['method']} {_name(scope['path'])}",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": scope["method"], "url.path": scope["path"]},
        )
        given: dict[str, str] = {}
        self._propagator.inject(given, set_span_in_context(span))
        kept = [pair for pair in scope["headers"] if pair[0] not in _CARRIED]
        scope["headers"] = kept + [(key.encode(), value.encode("latin-1")) for key, value in given.items()]
        return span


class _Watched:
    """`send` that tells the span what goes by."""

    def __init__(self, span: Span, send: Send) -> None:
        self._span = span
        self._send = send
        self._status, self._whole, self._began = 0, False, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start(message)
        elif message["type"] == "http.response.body":
            if not self._began:
                self._began = True
                self._span.add_event("first byte")
            self._whole = not message.get("more_body", False)
        await self._send(message)

    def end(self, scope: Scope) -> None:
        """The request is over."""
        self._span.set_attribute("kvist.tenant", scope.get(TENANT, ""))
        if self._status >= 500 or not self._whole:
            self._span.set_status(StatusCode.ERROR, "" if self._whole else "the answer did not end")
        self._span.end()

    def _start(self, message: Message) -> None:
        self._status = message["status"]
        self._span.set_attribute("http.response.status_code", self._status)
        for key, value in message["headers"]:
            if key.startswith(names.HEADER_PREFIX.encode()):
                name = key.decode().removeprefix(names.HEADER_PREFIX).replace("-", "_")
                self._span.set_attribute(f"kvist.{name}", value.decode("latin-1"))


def _name(path: str) -> str:
    """Of a few: collectors count by it."""
    if path in PATHS or path == "/v1/models":
        return path
    return STORED if route(path) is not None else "other"
