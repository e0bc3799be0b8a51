"""API keys as files hold them: only their hashes, so that a file that leaks opens nothing.

    sha256:5e88...42d8            a key of the tenant that the settings name for the file, or of nobody
    sha256:9f86...0a08 research   a key of this tenant; in `auth.keys_file` only
    # a remark

A line is made by `printf %s "$KEY" | sha256sum`. A fast hash suffices: keys are random, not chosen by people.
`KeyBook` is called by door.py for every request and looked after by a task of app.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from kvist_connector.errors import ConfigError
from kvist_connector.setting_files import bytes_of
from kvist_router.access.settings import TENANT_NAME, AuthSettings, TenantSettings
from kvist_router.changes import Stamp, stamp

LOOK_SECONDS = 1.0
MAX_FILE_BYTES = 16 * 2**20
_LINE = re.compile(r"sha256:([0-9a-fA-F]{64})(?:\s+(\S+))?")
_TENANT = re.compile(TENANT_NAME)
_log = logging.getLogger(__name__)


def hashed(key: bytes) -> bytes:
    """What files hold of a key."""
    return hashlib.sha256(key).digest()


def read_keys(path: Path, setting: str, tenant: str | None) -> dict[bytes, str]:
    """Tenant by hashed key; raises ConfigError without the line, which may be a key in the clear.

    `tenant`: whose keys they all are; None: each line may say.
    """
    try:
        text = bytes_of(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from error
    found: dict[bytes, str] = {}
    for number, raw in enumerate(text.decode("utf-8", "replace").splitlines(), 1):
        line = raw.strip()
        if line and not line.startswith("#"):
            key, owner = _read_line(line, f"{setting}: {path} line {number}", tenant)
            _put(found, key, owner, f"{setting}: {path} line {number}")
    return found


def _read_line(line: str, where: str, tenant: str | None) -> tuple[bytes, str]:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ConfigError(f"{where}: not `sha256:` and 64 hexadecimal digits; hash a key by sha256sum")
    owner = match[2]
    if owner is not None and (tenant is not None or len(owner) > 63 or not _TENANT.fullmatch(owner)):
        named = "a tenant's name is [A-Za-z0-9._-]+"
        reason = named if tenant is None else "these are all keys of one tenant"
        raise ConfigError(f"{where}: nothing may follow the hash here: {reason}")
    return bytes.fromhex(match[1]), owner or tenant or ""


def _put(found: dict[bytes, str], key: bytes, owner: str, where: str) -> None:
    if found.get(key, owner) != owner:
        raise ConfigError(f"{where}: this key is another tenant's already; give each its own")
    found[key] = owner


class KeyBook:
    """The keys of all files. Making one raises ConfigError; files that go wrong later leave the last keys."""

    def __init__(self, auth: AuthSettings, tenants: Sequence[TenantSettings], separated: bool) -> None:
        self._separated = separated
        self._problem = ""
        self._files: list[tuple[Path, str, str | None]] = []
        self.use(auth, tenants)

    def use(self, auth: AuthSettings, tenants: Sequence[TenantSettings]) -> None:
        """Take the files of other settings; raises ConfigError, and then keeps those it has."""
        files: list[tuple[Path, str, str | None]] = [
            (tenant.keys_file, f"tenants.{tenant.name}.keys_file", tenant.name)
            for tenant in tenants
            if tenant.keys_file is not None
        ]
        if auth.keys_file is not None:
            files.append((auth.keys_file, "auth.keys_file", None))
        stamps, keys = _stamps(files), _read_all(files, self._separated)
        self._files, self._stamps, self._keys = files, stamps, keys

    @property
    def asked(self) -> bool:
        """Whether requests need a key at all."""
        return bool(self._files)

    def tenant(self, key: bytes) -> str | None:
        """Whose key it is; None: nobody's."""
        return self._keys.get(hashed(key))

    async def watch(self) -> None:
        """Read files again when they change, for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Read again if a file has changed."""
        files = self._files
        stamps = _stamps(files)
        if stamps == self._stamps:
            return
        try:
            keys = _read_all(files, self._separated)
        except ConfigError as error:
            if str(error) != self._problem:  # once per cause
                _log.error("%s; the keys that were read before stay in force", error)
            self._problem = str(error)
            return
        if files is self._files:
            self._keys, self._stamps, self._problem = keys, stamps, ""
            _log.info("API keys were read again: %d keys", len(keys))


def _read_all(files: Sequence[tuple[Path, str, str | None]], separated: bool) -> dict[bytes, str]:
    found: dict[bytes, str] = {}
    for path, setting, tenant in files:
        for key, owner in read_keys(path, setting, tenant).items():
            _put(found, key, owner, f"{setting}: {path}")
    if not separated and any(found.values()):
        raise ConfigError(
            "tenant.secret_file: tenants need it: without a secret they would share what is cached; give a "
            "file with at least 16 random bytes"
        )
    return found


def _stamps(files: Sequence[tuple[Path, str, str | None]]) -> list[Stamp | None]:
    return [stamp(path) for path, _, _ in files]
