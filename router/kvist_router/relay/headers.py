"""Which headers pass through the relay. Pure; called by relay/app.py and upstream.py."""

from __future__ import annotations

from collections.abc import Sequence

from kvist_connector import names

RawHeaders = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
    b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
_REQUEST_DROPPED = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"authorization",
    b"x-request-id",
    b"expect",
    b"cookie",
}
_KVIST = names.HEADER_PREFIX.encode()
_REQUEST_ID, _REPLICA = names.HEADER_REQUEST_ID.encode(), names.HEADER_REPLICA.encode()
_PREDICTED = names.HEADER_PREDICTED_TOKENS.encode()
_ROUTED_BY = names.HEADER_ROUTED_BY.encode()


def request_headers(headers: Sequence[tuple[bytes, bytes]], request_id: str) -> RawHeaders:
    """Headers for the engine: the client's without hop-by-hop, credentials and ours; with our request id."""
    dropped = _with_named(_REQUEST_DROPPED, headers)
    kept = [pair for pair in headers if pair[0] not in dropped and not pair[0].startswith(_KVIST)]
    kept.append((b"x-request-id", request_id.encode()))
    return kept


def response_headers(headers: Sequence[tuple[bytes, bytes]], added: RawHeaders) -> RawHeaders:
    """Headers for the client: the engine's without hop-by-hop and without any that claims to be ours."""
    pairs = [(name.lower(), value) for name, value in headers]
    dropped = _with_named(_HOP_BY_HOP, pairs)
    kept = [(name, value) for name, value in pairs if name not in dropped and not name.startswith(_KVIST)]
    return kept + added


def kvist_headers(request_id: str, replica: str, predicted_tokens: int, routed_by: str = "") -> RawHeaders:
    """What every relayed response carries."""
    added = [
        (_REQUEST_ID, request_id.encode()),
        (_REPLICA, replica.encode("latin-1", "replace")),
        (_PREDICTED, b"%d" % predicted_tokens),
    ]
    return [*added, (_ROUTED_BY, routed_by.encode())] if routed_by else added


def is_event_stream(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether an event may be added: server-sent events, not compressed, of no stated length."""
    pairs = {name.lower(): value for name, value in headers}
    return (
        pairs.get(b"content-type", b"").lower().startswith(b"text/event-stream")
        and b"content-length" not in pairs
        and b"content-encoding" not in pairs
    )


def _with_named(dropped: frozenset[bytes], pairs: Sequence[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """`dropped` and the headers that a Connection header names."""
    for name, value in pairs:
        if name == b"connection":
            dropped |= {item.strip().lower() for item in value.split(b",")}
    return dropped
