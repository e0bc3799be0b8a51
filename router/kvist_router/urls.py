"""URLs in settings. Called by settings classes."""

from __future__ import annotations

from typing import Final

from pydantic import HttpUrl, TypeAdapter

_URL: Final = TypeAdapter(HttpUrl)


def checked_url(value: str) -> str:
    """An http(s) URL without a trailing slash; raises ValueError in words."""
    try:
        _URL.validate_python(value)
    except ValueError as error:
        raise ValueError(
            f"{value!r} is not an http:// or https:// URL, for example http://127.0.0.1:8100"
        ) from error
    return value.rstrip("/")
