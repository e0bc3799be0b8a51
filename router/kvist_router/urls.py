"""URLs in settings. Called by settings classes."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from pydantic import HttpUrl, TypeAdapter
from pydantic_core import PydanticCustomError

from kvist_connector.settings import WITHHELD

_URL: Final = TypeAdapter(HttpUrl)


def checked_url(value: str) -> str:
    """An http(s) URL without a trailing slash; raises ValueError in words.

    Paths are appended to it and it becomes a part of requests as it is, so it has nothing after its path,
    and no byte that a parser of URLs would leave out or pack.
    """
    try:
        _URL.validate_python(value)
        parts = urlsplit(value)
    except ValueError as error:
        raise _wrong(value) from error
    if parts.username is not None or parts.password is not None:
        raise PydanticCustomError(
            WITHHELD, "nobody is asked with user and password: leave them out of the URL"
        )
    if not value.isascii() or not value.isprintable() or any(sign in value for sign in " ?#\\"):
        raise _wrong(value)
    return value.rstrip("/")


def _wrong(value: str) -> ValueError:
    return ValueError(f"{value!r} is not an http:// or https:// URL, for example http://127.0.0.1:8100")
