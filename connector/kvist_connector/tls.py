"""TLS between routers, agents and peers: contexts made of files that may change while we run.

Torch-free, shared by agent and router. Both sides show a certificate and check the other's: its issuer, and
of agents the one name that all have, since they are reached by addresses that no certificate could list.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, model_validator

from kvist_connector.errors import ConfigError
from kvist_connector.settings import Settings

AGENT_NAME: Final = "kvist-agent"
log = logging.getLogger(__name__)


class MutualTls(Settings):
    """Own certificate, and whose certificates are believed."""

    certificate_file: Path | None = Field(
        None, description="PEM file with the own certificate and its chain; default none: no TLS"
    )
    key_file: Path | None = Field(None, description="PEM file with its key; default: in the same file")
    ca_file: Path | None = Field(
        None, description="PEM file with the CAs of the other side's certificates; required with the others"
    )
    name: str = Field(
        AGENT_NAME,
        min_length=1,
        max_length=253,
        description="DNS name in the certificates of all agents; default kvist-agent",
    )

    @model_validator(mode="after")
    def _all_or_none(self) -> MutualTls:
        if (self.certificate_file is None) != (self.ca_file is None):
            raise ValueError("certificate_file and ca_file belong together: give both or none")
        if self.key_file is not None and self.certificate_file is None:
            raise ValueError("key_file is of no use without certificate_file: give it, or leave both out")
        return self

    @property
    def used(self) -> bool:
        """Whether there is TLS at all."""
        return self.certificate_file is not None


class LiveContext:
    """Called for the context of the next connection; files are read again when they have changed.

    New files that make no sense leave the last ones in force. The context of a server stays one object, as
    its listener has it: to that CAs are added, and one that was taken away is believed until a restart.
    """

    def __init__(self, kind: Literal["client", "server"], files: MutualTls, setting: str) -> None:
        self._kind = kind
        self._files = files
        self._setting = setting
        self._problem = ""
        self._stamps = self._look()
        self._context = self._made()

    @property
    def name(self) -> str:
        """What the other side's certificate must be for."""
        return self._files.name

    def __call__(self) -> ssl.SSLContext:
        """Asks for the files' status each time."""
        stamps = self._look()
        if stamps != self._stamps:
            try:
                fresh = self._made()
                if self._kind == "server":
                    self._load(self._context)
                else:
                    self._context = fresh
            except ConfigError as error:
                if str(error) != self._problem:  # once per cause
                    log.error("%s; what was read before stays in force", error)
                self._problem = str(error)
            else:
                self._stamps, self._problem = stamps, ""
                log.info("%s: certificate and CAs were read again", self._setting)
        return self._context

    def _made(self) -> ssl.SSLContext:
        server = self._kind == "server"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if server:
            # Probes and scrapes have no certificate: who needs one is the application's affair.
            context.verify_mode = ssl.CERT_OPTIONAL
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        files = self._files
        assert files.certificate_file is not None  # see `used`
        try:
            # An encrypted key would ask on the terminal for its password.
            context.load_cert_chain(files.certificate_file, files.key_file, password=_no_password)
        except (OSError, ValueError) as error:
            raise self._unusable("certificate_file", files.certificate_file, error) from error
        try:
            context.load_verify_locations(files.ca_file)
        except (OSError, ValueError) as error:
            raise self._unusable("ca_file", files.ca_file, error) from error

    def _unusable(self, name: str, path: Path | None, error: OSError | ValueError) -> ConfigError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ConfigError(f"{self._setting}.{name}: {path} cannot be used: {reason}")

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        files = (self._files.certificate_file, self._files.key_file, self._files.ca_file)
        return tuple(None if path is None else _stamp(path) for path in files)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")
