"""The client of an object store from its settings: S3 and its like, Google, Azure, a shared folder."""

from __future__ import annotations

import configparser
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from obstore import exceptions
from obstore.store import from_url

from kvist_connector.errors import ConfigError
from kvist_connector.setting_files import text_of
from kvist_connector.tiers.object_store import explain

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend
    from obstore.store import S3Credential

S3_SCHEMES: Final = ("s3", "s3a")
# A rotated file is noticed after at most this long.
_CREDENTIAL_LIFE: Final = timedelta(minutes=1)


@dataclass(frozen=True)
class Bucket:
    """Where objects lie. Seconds throughout."""

    url: str
    endpoint: str | None = None
    region: str | None = None
    credentials_file: Path | None = None
    timeout: float = 30.0  # of one request, its bytes included
    connect_timeout: float = 5.0


def open_backend(bucket: Bucket) -> Backend:
    """No connection is made. Raises ConfigError naming the setting."""
    scheme = urlsplit(bucket.url).scheme
    options: dict[str, Any] = {}
    if scheme == "file":
        options["mkdir"] = True
    elif scheme != "memory":
        options = _remote_options(scheme, bucket)
    try:
        backend: Backend = from_url(bucket.url, **options)
    except (exceptions.BaseError, ValueError, OSError) as error:
        raise ConfigError(f"object_store.url: {bucket.url} cannot be used: {explain(error)}") from error
    return backend


def _remote_options(scheme: str, bucket: Bucket) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if bucket.endpoint is not None:
        config["endpoint"] = bucket.endpoint
    if bucket.region is not None:
        config["region"] = bucket.region
    options: dict[str, Any] = {
        "client_options": {
            # Plain HTTP is the choice of whoever writes http:// into the endpoint.
            "allow_http": (bucket.endpoint or "").startswith("http://"),
            "timeout": timedelta(seconds=bucket.timeout),
            "connect_timeout": timedelta(seconds=bucket.connect_timeout),
        },
        # The breaker decides when to try again.
        "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=bucket.timeout)},
    }
    if bucket.credentials_file is not None:
        if scheme in S3_SCHEMES:
            read_s3_credentials(bucket.credentials_file)
            options["credential_provider"] = s3_provider(bucket.credentials_file)
        elif scheme == "gs":
            config["service_account"] = str(bucket.credentials_file)
        else:
            config |= _section(bucket.credentials_file)
    return options | {"config": config}


def s3_provider(path: Path) -> Callable[[], S3Credential]:
    """Reads the file again whenever what it gave has become old."""

    def provide() -> S3Credential:
        found = read_s3_credentials(path)
        found["expires_at"] = datetime.now(UTC) + _CREDENTIAL_LIFE
        return found

    return provide


def read_s3_credentials(path: Path) -> S3Credential:
    """An AWS credentials file: its section `default`, or the only one. Raises ConfigError."""
    values = _section(path)
    missing = [name for name in ("aws_access_key_id", "aws_secret_access_key") if not values.get(name)]
    if missing:
        raise ConfigError(f"object_store.credentials_file: {path} has no {' and no '.join(missing)}")
    return {
        "access_key_id": values["aws_access_key_id"],
        "secret_access_key": values["aws_secret_access_key"],
        "token": values.get("aws_session_token"),
        "expires_at": None,
    }


def _section(path: Path) -> Mapping[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(text_of(path), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"object_store.credentials_file: {path} cannot be read: {error}") from error
    except configparser.Error:
        # Its message shows lines of the file, and a secret may be in them.
        raise ConfigError(
            f"object_store.credentials_file: {path} is no AWS credentials file: write [default], NAME = VALUE"
        ) from None
    if parser.has_section("default"):
        return dict(parser["default"])
    if len(parser.sections()) == 1:
        return dict(parser[parser.sections()[0]])
    raise ConfigError(
        f"object_store.credentials_file: {path} has no section [default]: write an AWS credentials file"
    )
