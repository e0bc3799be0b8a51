"""TLS of the router's own ports. Called by app.py; certificates are read again when their files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from kvist_connector.errors import ConfigError
from kvist_connector.settings import Settings
from kvist_router.changes import Stamp, stamp

LOOK_SECONDS = 1.0
_log = logging.getLogger(__name__)


class TlsSettings(Settings):
    """Certificates of the router."""

    certificate_file: Path | None = Field(
        default=None, description="PEM file with the certificate and its chain; none: no TLS"
    )
    key_file: Path | None = Field(
        default=None, description="PEM file with its key; default: in the same file as the certificate"
    )
    client_ca_file: Path | None = Field(
        default=None, description="PEM file with CAs; with it a client needs a certificate of one of them"
    )
    admin: bool = Field(default=False, description="whether the admin port has TLS too")

    @model_validator(mode="after")
    def _needs_certificate(self) -> Self:
        if self.certificate_file is None and (self.key_file or self.client_ca_file or self.admin):
            raise ValueError("tls.certificate_file is missing: give it, or leave tls out")
        return self


class ServerTls:
    """One context for all connections. Making it raises ConfigError when a file is wrong."""

    def __init__(self, settings: TlsSettings, certificate: Path) -> None:
        self._certificate, self._key = certificate, settings.key_file
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._problem = ""
        self._stamps = self._look()
        self._load(self.context)
        if settings.client_ca_file is not None:
            self._trust(settings.client_ca_file)

    async def watch(self) -> None:
        """Take new certificates, for ever. Connections that are there keep the old one."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Take a new certificate if there is one."""
        stamps = self._look()
        if stamps == self._stamps:
            return
        try:
            # A context of its own first: half of a pair that changes must not reach the one in use.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except ConfigError as error:
            if str(error) != self._problem:  # once per cause
                _log.error("%s; the certificate that was read before stays in force", error)
            self._problem = str(error)
            return
        self._stamps, self._problem = stamps, ""
        _log.info("certificate %s was read again", self._certificate)

    def _look(self) -> tuple[Stamp | None, ...]:
        return stamp(self._certificate), stamp(self._key) if self._key is not None else None

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            # An encrypted key would ask on the terminal for its password.
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"tls.certificate_file: {self._certificate} and its key cannot be used: {_reason(error)}"
            ) from error

    def _trust(self, path: Path) -> None:
        try:
            self.context.load_verify_locations(path)
        except OSError as error:
            raise ConfigError(f"tls.client_ca_file: {path} cannot be used: {_reason(error)}") from error
        self.context.verify_mode = ssl.CERT_REQUIRED


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
