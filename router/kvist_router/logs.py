"""The router's log: lines for people or JSON for machines, and on request one line for each request.

Called by app.py. No text of a prompt or an answer is in it unless `log.bodies` is on.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvist_connector import names
from kvist_connector.log_lines import LineFormatter
from kvist_router.log_settings import LONGEST_BODY, LogSettings
from kvist_router.relay.app import TENANT

FIELDS: Final = "kvist_fields"  # attribute of a log record: a mapping of what its line is about
_QUIET: Final = (names.PATH_HEALTHZ, names.PATH_READYZ, names.PATH_METRICS)
_requests = logging.getLogger("kvist.requests")


class TextFormatter(LineFormatter):
    """`name=value` behind the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base's name
        """One line."""
        fields: dict[str, Any] = getattr(record, FIELDS, {})
        pairs = [f" {name}={json.dumps(value)}" for name, value in fields.items()]
        return super().formatMessage(record) + "".join(pairs)


class JsonFormatter(logging.Formatter):
    """time, level, logger, message and the fields; `trace` of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class LogHandler(logging.StreamHandler[TextIO]):
    """The router's own way to standard error, beside whatever else listens."""


def configure(level: str, settings: LogSettings) -> None:
    """Log to standard error."""
    logging.getLogger().addHandler(LogHandler(sys.stderr))
    reconfigure(level, settings)


def reconfigure(level: str, settings: LogSettings) -> None:
    """Log in another way from now on, if this program logs at all."""
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, LogHandler):
            root.setLevel(level.upper())
            handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())


@dataclass(slots=True)
class _Line:
    """What was seen of one request so far."""

    started: float
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    first: float | None = None
    ended: bool = False
    body: bytearray = field(default_factory=bytearray)


class RequestLog:
    """ASGI around the endpoint. `settings` may be replaced at any time."""

    def __init__(
        self, app: ASGIApp, settings: LogSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if not self.settings.requests or scope["type"] != "http" or scope["path"] in _QUIET:
            await self._app(scope, receive, send)
            return
        line = _Line(self._clock())
        given = self._reading(line, receive) if self.settings.bodies else receive
        try:
            await self._app(scope, given, self._watching(line, send))
        finally:
            self._write(scope, line)

    def _watching(self, line: _Line, send: Send) -> Send:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status, line.headers = message["status"], dict(message["headers"])
            elif message["type"] == "http.response.body":
                if line.first is None:
                    line.first = self._clock()
                line.ended = not message.get("more_body", False)
            await send(message)

        return watched

    def _reading(self, line: _Line, receive: Receive) -> Receive:
        async def read() -> Message:
            message = await receive()
            piece = message.get("body", b"")
            line.body += piece[: LONGEST_BODY - len(line.body)]
            return message

        return read

    def _write(self, scope: Scope, line: _Line) -> None:
        fields: dict[str, Any] = {
            "request": _text(line, names.HEADER_REQUEST_ID),
            "path": scope["path"],
            "status": line.status,
            "whole": line.ended,
            "tenant": scope.get(TENANT, ""),
            "client": (scope.get("client") or ("",))[0],
            "replica": _text(line, names.HEADER_REPLICA),
            "predicted_tokens": int(_text(line, names.HEADER_PREDICTED_TOKENS) or 0),
            "first_byte_seconds": None if line.first is None else round(line.first - line.started, 6),
            "seconds": round(self._clock() - line.started, 6),
        }
        if self.settings.bodies:
            fields["body"] = line.body.decode("utf-8", "replace")
        _requests.info("request", extra={FIELDS: fields})


def _text(line: _Line, header: str) -> str:
    return line.headers.get(header.encode(), b"").decode("latin-1")
