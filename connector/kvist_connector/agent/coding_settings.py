"""Settings of how chunks are stored in lower tiers: compressed, encrypted."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field

from kvist_connector.settings import Settings

COMPRESSION: Final = (
    "none (default): chunks are stored as they are; zstd: byte planes of 16-bit values, losslessly; "
    "auto: zstd while reads were measured to end earlier with it; fp8: LOSSY, values are rounded to "
    "float8_e4m3 and the model's answers change; the agent's chunks are kept apart from exact ones"
)


class EncryptionSettings(Settings):
    """Encryption of disk and shared tiers, AES-256-GCM; absent unless a key file is given."""

    keys_file: Path | None = Field(
        None,
        description="file with a key a line, `name base64-of-32-bytes`: the first encrypts, each decrypts; "
        "read again when it changes; plain chunks are removed then; default none: chunks are stored plain, "
        "and encrypted ones are misses",
    )
