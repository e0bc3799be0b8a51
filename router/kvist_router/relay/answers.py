"""Answers that the router gives itself, errors in OpenAI's form. Called by relay/app.py and app.py."""

from __future__ import annotations

import msgspec
from starlette.types import Send

from kvist_router.mind.interface import Refusal
from kvist_router.relay.headers import RawHeaders


def error_body(refusal: Refusal) -> bytes:
    """{"error": {"message", "type", "param", "code"}}."""
    error = {
        "message": refusal.message,
        "type": refusal.type,
        "param": refusal.param,
        "code": refusal.code,
    }
    return msgspec.json.encode({"error": error})


async def send_refusal(send: Send, refusal: Refusal, added: RawHeaders | None = None) -> None:
    """Send a refusal as the whole response."""
    headers = list(added or [])
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.retry_after is not None:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    if refusal.status in (408, 413):  # part of the body may still be unread on this connection
        headers.append((b"connection", b"close"))
    await send_body(send, refusal.status, error_body(refusal), headers)


async def send_body(send: Send, status: int, body: bytes, headers: RawHeaders) -> None:
    """Send a JSON response."""
    all_headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


TOO_LATE = Refusal(504, "the engine did not answer in time", "timeout_error", code="upstream_timeout")
SLOW_BODY = Refusal(408, "the request body did not arrive in time", "timeout_error", code="request_timeout")
NO_DECISION = Refusal(503, "no decision in time", "service_unavailable", code="overloaded", retry_after=1)
INTERNAL = Refusal(
    500, "internal error of the router; its log says more", "server_error", code="internal_error"
)


def not_allowed(method: str) -> Refusal:
    """A path was asked in another way than its own."""
    return Refusal(405, f"this path takes {method}", code="method_not_allowed")


def bad_gateway(problem: str) -> Refusal:
    """An engine failed and no other could take over."""
    return Refusal(
        502, f"the engine failed before it answered: {problem}", "server_error", code="upstream_failed"
    )


def broken_stream(problem: str) -> Refusal:
    """An engine failed in mid-stream; the status is not sent any more."""
    return Refusal(502, f"the engine failed in mid-answer: {problem}", "server_error", code="upstream_failed")
