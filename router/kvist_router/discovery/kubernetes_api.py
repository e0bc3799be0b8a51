"""Reading one collection of a Kubernetes API server: list, and watch as lines. Called by kubernetes.py.

Token and CA file are read again for every request: both rotate while we run. No client library: one
collection is read, and nothing is written.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvist_connector.setting_files import bytes_of
from kvist_router.bounded import body_of, lines_of
from kvist_router.errors import DiscoveryError, Expired

MAX_ANSWER_BYTES = 64 * 2**20
MAX_LINE_BYTES = 16 * 2**20
_MAX_WORDS = 300  # of the server's own text in an error


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API server is and how it is asked; None: without token, the system's CAs."""

    server: str
    token_file: Path | None
    ca_file: Path | None


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds."""

    request: float = 10.0  # to connect, and of a whole list
    silence: float = 15.0  # beyond the time that a watch may be quiet


class KubernetesApi:
    """GET requests with the service account's credentials; raises DiscoveryError, Expired."""

    def __init__(
        self, session: aiohttp.ClientSession, access: Access, deadlines: Deadlines = Deadlines()
    ) -> None:
        self._session = session
        self._access = access
        self._deadlines = deadlines
        self._ca: tuple[bytes, ssl.SSLContext] | None = None

    async def get(self, path: str, parameters: Mapping[str, str]) -> bytes:
        """The whole answer."""
        limits = aiohttp.ClientTimeout(total=self._deadlines.request)
        async with self._open(path, parameters, limits) as answer:
            return await body_of(answer, MAX_ANSWER_BYTES)

    async def lines(self, path: str, parameters: Mapping[str, str], seconds: float) -> AsyncIterator[bytes]:
        """Lines of a watch that the server ends after `seconds`."""
        limits = aiohttp.ClientTimeout(
            sock_connect=self._deadlines.request, sock_read=seconds + self._deadlines.silence
        )
        async with self._open(path, parameters, limits) as answer:
            async for line in lines_of(answer, MAX_LINE_BYTES):
                if line.strip():
                    yield line

    @asynccontextmanager
    async def _open(
        self, path: str, parameters: Mapping[str, str], limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers, context = await asyncio.to_thread(self._credentials)
        url = self._access.server + path
        try:
            async with self._session.get(
                url, params=parameters, headers=headers, timeout=limits, ssl=context or True
            ) as answer:
                if answer.status != 200:
                    raise _refused(answer.status, (await answer.content.read(2**16)).decode(errors="replace"))
                yield answer
        except TimeoutError as error:
            raise DiscoveryError(f"{self._access.server} did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise DiscoveryError(f"{self._access.server}: {type(error).__name__}: {error}") from error

    def _credentials(self) -> tuple[dict[str, str], ssl.SSLContext | None]:
        token = _read(self._access.token_file, "kubernetes.token_file").decode(errors="replace").strip()
        headers = {"accept": "application/json"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        if not self._access.server.startswith("https:") or self._access.ca_file is None:
            return headers, None
        ca = _read(self._access.ca_file, "kubernetes.ca_file")
        if self._ca is None or self._ca[0] != ca:
            try:
                self._ca = ca, ssl.create_default_context(cadata=ca.decode())
            except (ssl.SSLError, ValueError) as error:
                raise DiscoveryError(f"kubernetes.ca_file {self._access.ca_file}: no certificates") from error
        return headers, self._ca[1]


def _read(path: Path | None, setting: str) -> bytes:
    if path is None:
        return b""
    try:
        return bytes_of(path)
    except OSError as error:
        raise DiscoveryError(f"{setting}: {path} cannot be read: {error.strerror}") from error


def _refused(status: int, text: str) -> DiscoveryError:
    if status == 410:
        return Expired("the version that was watched is gone")
    remedy = {
        401: "; is the service account's token valid?",
        403: "; let the service account get, list and watch endpointslices of this namespace",
        404: "; is this a Kubernetes API server?",
    }.get(status, "")
    return DiscoveryError(f"the API server answers {status}{remedy} ({text[:_MAX_WORDS]})")
