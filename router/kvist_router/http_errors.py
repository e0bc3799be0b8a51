"""One form for every error of the router's own pages: OpenAI's. Called by endpoint.py and admin.py."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kvist_router.mind.interface import Refusal
from kvist_router.relay.answers import INTERNAL, error_body


def one_error_form(app: FastAPI, paths: str) -> None:
    """Install the handlers; `paths` tells who asks for something else what there is."""

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return refused(_refusal(error, paths), error.headers)

    @app.exception_handler(RequestValidationError)
    async def wrong_parameter(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        text = f"{name}: {str(first.get('input'))[:200]!r} is not valid: {first['msg']}"
        return refused(Refusal(422, text, param=name, code="invalid_parameter"))

    @app.exception_handler(Exception)
    async def any_error(_: Request, error: Exception) -> Response:
        return refused(INTERNAL)


def refused(refusal: Refusal, headers: object = None) -> Response:
    """A refusal as a response."""
    kept = dict(headers) if isinstance(headers, dict) else None
    return Response(error_body(refusal), refusal.status, kept, "application/json")


def _refusal(error: HTTPException, paths: str) -> Refusal:
    if error.status_code == 404:
        return Refusal(404, f"no such path; served: {paths}", code="not_found")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return Refusal(405, f"this path takes {allowed}", code="method_not_allowed")
    return Refusal(error.status_code, str(error.detail))
