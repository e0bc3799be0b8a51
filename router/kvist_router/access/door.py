"""The check of a request before anything of it is read but its headers. Called by endpoint.py.

With API keys the key says who the tenant is, and no header of the client can. Without keys a gateway in
front is trusted to set the tenant's header.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvist_router.access.keys import KeyBook
from kvist_router.access.settings import MAX_TENANT_BYTES
from kvist_router.errors import Refused
from kvist_router.mind.interface import Refusal

_AUTHORIZATION = b"authorization"


class Door:
    """`header`: the one that says the tenant where there are no keys."""

    def __init__(self, book: KeyBook, header: str) -> None:
        self._book = book
        self._header = header.encode()

    @property
    def locked(self) -> bool:
        """Whether a key is needed."""
        return self._book.asked

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Who sends a request with these headers; raises Refused."""
        if not self._book.asked:
            return _named(_only(headers, self._header), self._header)
        given = _only(headers, _AUTHORIZATION)
        if not given:
            raise Refused(_NO_KEY)
        scheme, _, key = given.partition(b" ")
        tenant = self._book.tenant(key.strip()) if scheme.lower() == b"bearer" else None
        if tenant is None:
            raise Refused(_WRONG_KEY)
        return tenant


def _named(value: bytes, header: bytes) -> str:
    """The tenant's whole name: cut or read loosely, two tenants would share what is cached."""
    name = header.decode()
    if len(value) > MAX_TENANT_BYTES:
        raise _wrong(f"the header {name} has {len(value)} bytes; give at most {MAX_TENANT_BYTES}")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise _wrong(f"the header {name} is not UTF-8; encode the tenant's name so") from error


def _only(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    """Its value, b"" when absent. Given twice, whoever is behind may read the other one."""
    values = [value for name, value in headers if name == wanted]
    if len(values) > 1:
        raise _wrong(f"the header {wanted.decode()} is given twice")
    return values[0] if values else b""


def _wrong(text: str) -> Refused:
    return Refused(Refusal(400, text, code="invalid_header"))


_NO_KEY = Refusal(
    401, "an API key is needed: Authorization: Bearer KEY", "authentication_error", code="missing_api_key"
)
_WRONG_KEY = Refusal(401, "this API key is not known here", "authentication_error", code="invalid_api_key")
