"""The cache salt of a tenant: tenants never reuse each other's state. Called by mind and relays."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from kvist_connector.errors import ConfigError
from kvist_connector.setting_files import bytes_of


def tenant_salt(secret: bytes, tenant: str) -> str:
    """HMAC-SHA256 of the tenant's name under the cluster's secret, in hexadecimal."""
    return hmac.new(secret, tenant.encode(), hashlib.sha256).hexdigest()


def read_secret(path: Path | None) -> bytes | None:
    """The cluster's secret (`tenant.secret_file`); raises ConfigError."""
    if path is None:
        return None
    try:
        secret = bytes_of(path).strip()
    except OSError as error:
        raise ConfigError(f"tenant.secret_file: {path} cannot be read: {error.strerror}") from error
    if len(secret) < 16:
        raise ConfigError(f"tenant.secret_file: {path} holds {len(secret)} bytes; give at least 16")
    return secret
