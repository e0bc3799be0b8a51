"""AES-256-GCM of chunks at rest, with keys from a file.

The file has one key a line, `name base64-of-32-bytes`: the first one encrypts, every one
decrypts. To rotate, add a new line last on every agent, then put it first on every agent, so that
none stores what another cannot read yet; take the old one away when no chunk needs it (those that
still do are misses).

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

    @property
    def names(self) -> str:
        """Of all of them, for messages."""
        return ", ".join(sorted(self.keys))

    def encrypt(self, parts: Sequence[Buffer], header: bytes) -> list[bytes]:
        """Nonce and ciphertext of the concatenated parts."""
        nonce = os.urandom(NONCE_BYTES)
        return [nonce, self.keys[self.writing].encrypt(nonce, b"".join(parts), header)]

    def decrypt(self, name: str, sealed: bytes, header: bytes) -> bytes:
        """Raises LockedChunk in words."""
        key = self.keys.get(name)
        if key is None:
            raise LockedChunk(f"encrypted by key {name!r}, the key file has {self.names}: add that key")
        view = memoryview(sealed)
        try:
            return key.decrypt(view[:NONCE_BYTES], view[NONCE_BYTES:], header)
        except (InvalidTag, ValueError) as error:
            raise LockedChunk(
                f"key {name!r} does not open it: the key file has another key of that name, or "
                "somebody changed the chunk"
            ) from error


def parse_keys(text: str, where: str) -> Keyring:
    """Of a key file; `where` begins the ConfigError, which never has a key in it."""
    keys: dict[str, AESGCM] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, key = _parse(line, f"{where}: line {number}")
        if name in keys:
            raise ConfigError(f"{where}: line {number} names {name!r} again: remove one")
        keys[name] = key
    if not 0 < len(keys) <= _MOST_KEYS:
        raise ConfigError(
            f"{where} has {len(keys)} keys: write 1 to {_MOST_KEYS} lines `name base64-of-32-bytes`"
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
