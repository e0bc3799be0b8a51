"""AES-256-GCM of chunks at rest, with keys from a file.

The file has one key a line, `name base64-of-32-bytes`: the first one encrypts, every one
decrypts. To rotate, put a new line first on every agent, and take the old one away when no
chunk needs it (those that still do are misses).

Nonces are 96 random bits, drawn anew for every write and stored before the ciphertext. By the
rule for random nonces (NIST SP 800-38D, 8.3) a key is good for 2^32 chunks over all agents:
rotate before. The header is authenticated with the body, so that no chunk passes for another.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvist_connector.errors import ConfigError
from kvist_connector.tiers.base import Buffer
from kvist_connector.tiers.header import NONCE_BYTES, LockedChunk

_KEY_BYTES: Final = 32
_MOST_KEYS: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Keyring:
    """Keys by name; `writing` names the one that encrypts."""

    writing: str
    keys: Mapping[str, AESGCM]

    def encrypt(self, parts: Sequence[Buffer], header: bytes) -> list[bytes]:
        """Nonce and ciphertext of the concatenated parts."""
        nonce = os.urandom(NONCE_BYTES)
        return [nonce, self.keys[self.writing].encrypt(nonce, b"".join(parts), header)]

    def decrypt(self, name: str, sealed: bytes, header: bytes) -> bytes:
        """Raises LockedChunk in words."""
        key = self.keys.get(name)
        if key is None:
            known = ", ".join(sorted(self.keys))
            raise LockedChunk(f"encrypted by key {name!r}, the key file has {known}: add that key")
        view = memoryview(sealed)
        try:
            return key.decrypt(view[:NONCE_BYTES], view[NONCE_BYTES:], header)
        except (InvalidTag, ValueError) as error:
            raise LockedChunk(
                f"key {name!r} does not open it: the key file has another key of that name, or "
                "somebody changed the chunk"
            ) from error


def read_keys(path: Path, setting: str) -> Keyring:
    """Raises ConfigError, which never has a key in it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{setting}: {path} cannot be read: {reason}") from error
    keys: dict[str, AESGCM] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, key = _parse(line, f"{setting}: line {number} of {path}")
        if name in keys:
            raise ConfigError(f"{setting}: line {number} of {path} names {name!r} again: remove one")
        keys[name] = key
    if not 0 < len(keys) <= _MOST_KEYS:
        raise ConfigError(
            f"{setting}: {path} has {len(keys)} keys: write 1 to {_MOST_KEYS} lines `name base64-of-32-bytes`"
        )
    return Keyring(next(iter(keys)), keys)


def _parse(line: str, where: str) -> tuple[str, AESGCM]:
    name, _, text = line.strip().partition(" ")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where} begins with no key name: letters, digits and ._- are allowed")
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"{where} has no base64 after the name: write {_KEY_BYTES} random bytes") from error
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{where} has a key of {len(key)} bytes: AES-256 needs {_KEY_BYTES}")
    return name, AESGCM(key)
