"""The ASGI application of the hot paths: body in, decision, one or two attempts, bytes out.

Called by app.py's dispatcher. Status and headers are sent with the first body byte, so until then
the request may go to another replica: once, within the retry budget. Whatever way a request
ends, the mind hears of it exactly once per attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from kvist_router.errors import Refused, UpstreamError, UpstreamTimeoutError
from kvist_router.metrics import RelayMetrics
from kvist_router.mind.interface import Decision, Metadata, Mind, Path, Refusal, Report
from kvist_router.relay import answers
from kvist_router.relay.body import ClientGone, read_body
from kvist_router.relay.budget import RetryBudget
from kvist_router.relay.headers import kvist_headers, request_headers, response_headers
from kvist_router.relay.upstream import Attempt, Upstream
from kvist_router.relay.watch import Watch
from kvist_router.settings import LimitSettings

PATHS: dict[str, Path] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Exchange:
    """One request on its way."""

    scope: Scope
    send: Send
    watch: Watch
    body: bytes
    metadata: Metadata
    started: float
    answered: bool = False  # status and headers are out


class Relay:
    """ASGI for `PATHS`; the dispatcher sends nothing else here."""

    def __init__(
        self, mind: Mind, upstream: Upstream, limits: LimitSettings, metrics: RelayMetrics, tenant_header: str
    ) -> None:
        self._mind = mind
        self._upstream = upstream
        self._limits = limits
        self._metrics = metrics
        self._budget = RetryBudget(limits.retry_ratio)
        self._tenant_header = tenant_header.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await answers.send_refusal(send, answers.NOT_ALLOWED, [(b"allow", b"POST")])
            return
        self._metrics.in_flight.inc()
        outcome = "failed"
        try:
            outcome = await self._serve(scope, receive, send)
        except Refused as refused:
            outcome = "refused"
            await answers.send_refusal(send, refused.refusal)
        except ClientGone:
            outcome = "cancelled"
        finally:
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(outcome).inc()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> str:
        started = time.monotonic()
        headers = scope["headers"]
        body = await read_body(receive, headers, self._limits.body_bytes, self._limits.body_seconds)
        tenant = next((value for name, value in headers if name == self._tenant_header), b"")
        metadata = Metadata(PATHS[scope["path"]], tenant.decode("latin-1"))
        async with Watch(receive, self._limits.idle_seconds) as watch:
            exchange = _Exchange(scope, send, watch, body, metadata, started)
            return await self._route(exchange)
        return "cancelled" if watch.reason == "client gone" else "failed"

    async def _route(self, exchange: _Exchange) -> str:
        self._budget.request()
        decision = await self._decide(exchange.body, exchange.metadata)
        result = await self._attempt(exchange, decision, may_retry=True)
        if isinstance(result, Decision):
            self._metrics.retries.inc()
            result = await self._attempt(exchange, result, may_retry=False)
        assert isinstance(result, str)  # an attempt without retry never asks for one
        return result

    async def _decide(self, body: bytes, metadata: Metadata) -> Decision:
        try:
            async with asyncio.timeout(self._limits.decide_seconds):
                decision = await self._mind.decide(body, metadata)
        except TimeoutError as error:
            raise Refused(answers.NO_DECISION) from error
        if isinstance(decision, Refusal):
            raise Refused(decision)
        return decision

    async def _attempt(self, exchange: _Exchange, decision: Decision, may_retry: bool) -> str | Decision:
        """Relay one replica's answer: how it ended, or the decision for the second attempt."""
        end: Report | None = Report("cancelled")
        try:
            async with self._open(exchange, decision) as attempt:
                if attempt.status < 500:
                    await self._mind.report(decision.id, Report("accepted"))
                    await self._mind.report(decision.id, Report("first_byte"))
                else:
                    end = None
                    await self._end(decision, UpstreamError(f"status {attempt.status}"))
                    second = await self._second(exchange, decision) if may_retry else None
                    if second is not None:
                        return second
                await self._relay(exchange, decision, attempt)
                if end is not None:
                    end = Report("ended", error=_status(attempt.status))
                return _outcome(attempt.status)
        except UpstreamError as error:
            end = None
            await self._end(decision, error)
            return await self._failed(exchange, decision, error, may_retry)
        finally:
            if end is not None:
                await self._mind.report(decision.id, end)

    async def _end(self, decision: Decision, error: UpstreamError) -> None:
        """Report a failed attempt; before a retry, since that has the same id."""
        self._metrics.upstream_errors.labels(decision.replica).inc()
        _log.warning("request %s failed at %s: %s", decision.id, decision.replica, error)
        await self._mind.report(decision.id, Report("failed", str(error), error.unreachable))

    async def _failed(
        self, exchange: _Exchange, decision: Decision, error: UpstreamError, may_retry: bool
    ) -> str | Decision:
        if exchange.answered:
            return "failed"  # the client sees a truncated answer: its connection is closed
        if isinstance(error, UpstreamTimeoutError):
            raise Refused(answers.TOO_LATE) from error
        second = await self._second(exchange, decision) if may_retry else None
        if second is None:
            raise Refused(answers.bad_gateway(f"{decision.replica}: {error}")) from error
        return second

    async def _second(self, exchange: _Exchange, first: Decision) -> Decision | None:
        """The decision for a retry on another replica; None when there is none or the budget is spent."""
        if not self._budget.retry():
            return None
        retry = Metadata(exchange.metadata.path, exchange.metadata.tenant, first.id, (first.replica,))
        try:
            return await self._decide(exchange.body, retry)
        except Refused:
            return None

    def _open(self, exchange: _Exchange, decision: Decision) -> AbstractAsyncContextManager[Attempt]:
        url = decision.url + exchange.scope["path"]
        query = exchange.scope["query_string"]
        if query:
            url += "?" + query.decode("latin-1")
        headers = request_headers(exchange.scope["headers"], decision.id)
        return self._upstream.open(url, headers, exchange.body if decision.body is None else decision.body)

    async def _relay(self, exchange: _Exchange, decision: Decision, attempt: Attempt) -> None:
        watch, send = exchange.watch, exchange.send
        added = kvist_headers(decision.id, decision.replica, decision.predicted_tokens)
        first_at = time.monotonic()
        exchange.answered = True
        watch.beat()
        await send(
            {
                "type": "http.response.start",
                "status": attempt.status,
                "headers": response_headers(attempt.headers, added),
            }
        )
        await send({"type": "http.response.body", "body": attempt.first, "more_body": True})
        pieces = 0
        async for piece in attempt.rest():
            watch.beat()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            pieces += 1
        await send({"type": "http.response.body", "body": b""})
        if decision.stream and attempt.status < 400:
            cache = "warm" if decision.predicted_tokens else "cold"
            self._metrics.ttft.labels(cache).observe(first_at - exchange.started)
            if pieces:
                self._metrics.itl.labels(cache).observe((time.monotonic() - first_at) / pieces)


def _status(status: int) -> str:
    return "" if status < 400 else f"status {status}"


def _outcome(status: int) -> str:
    if status < 400:
        return "ended"
    return "rejected" if status < 500 else "failed"
