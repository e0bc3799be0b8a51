"""Options of who asks: token, certificate, and whose certificates are believed. Used by all that ask."""

from __future__ import annotations

import functools
import inspect
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvist_cli.asking import Credentials
from kvist_cli.commands.options import TokenFile
from kvist_cli.folders import expanded
from kvist_cli.target import token
from kvist_connector.errors import ConfigError
from kvist_connector.tls import AGENT_NAME

_PANEL: Final = "TLS"
PARAMETER: Final = "credentials"


def _option(flag: str, variable: str, text: str) -> Any:
    return typer.Option(flag, envvar=variable, help=text, rich_help_panel=_PANEL)


Ca = Annotated[
    Path | None,
    _option("--ca", "KVIST_CA", "PEM file with the CAs that are believed. Default: the system's."),
]
Certificate = Annotated[
    Path | None,
    _option("--client-certificate", "KVIST_CLIENT_CERTIFICATE", "PEM file with the own certificate."),
]
Key = Annotated[
    Path | None,
    _option("--client-key", "KVIST_CLIENT_KEY", "PEM file with its key. Default: in the same file."),
]
TlsName = Annotated[
    str,
    _option("--tls-name", "KVIST_TLS_NAME", "DNS name in the agents' certificates, as their tls.name."),
]
OPTIONS: Final[tuple[tuple[str, Any, Any], ...]] = (
    ("token_file", TokenFile, None),
    ("ca", Ca, None),
    ("client_certificate", Certificate, None),
    ("client_key", Key, None),
    ("tls_name", TlsName, AGENT_NAME),
)


def taken(given: dict[str, Any]) -> Credentials:
    """What the options say, which leave `given`; raises ConfigError."""
    found = {name: given.pop(name) for name, _, _ in OPTIONS}
    tls = _context(found["ca"], found["client_certificate"], found["client_key"])
    return Credentials(token(found["token_file"]), tls, found["tls_name"])


def identified(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options; it gets what they say as `credentials`."""
    own = inspect.signature(function, eval_str=True).parameters

    @functools.wraps(function)
    def command(**given: Any) -> None:
        credentials = taken(given)
        function(**given, **{PARAMETER: credentials})

    kept = (own[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in own if name != PARAMETER)
    command.__signature__ = inspect.Signature([*kept, *parameters(OPTIONS)])  # type: ignore[attr-defined]
    return command


def parameters(options: Iterable[tuple[str, Any, Any]]) -> list[inspect.Parameter]:
    """Of a signature, out of (name, annotation, default)."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, kind, default=default, annotation=option) for name, option, default in options
    ]


def _context(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if key is not None and certificate is None:
        raise ConfigError(
            "--client-key is of no use without --client-certificate: give it, or leave both out"
        )
    if ca is None and certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=None if ca is None else expanded(ca, "--ca"))
    except (OSError, ValueError) as error:
        raise _unusable("--ca", ca, error) from error
    if certificate is not None:
        try:
            chain = expanded(certificate, "--client-certificate")
            own = None if key is None else expanded(key, "--client-key")
            context.load_cert_chain(chain, own, password=_no_password)
        except (OSError, ValueError) as error:
            raise _unusable("--client-certificate", certificate, error) from error
    return context


def _unusable(flag: str, path: Path | None, error: OSError | ValueError) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ConfigError(f"{flag} {path}: cannot be used: {reason}; give a PEM file")


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")
