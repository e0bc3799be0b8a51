"""The keys that encrypt chunks, from a file. Imported only by agents that encrypt."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from kvist_connector.agent.live_file import LiveFile
from kvist_connector.tiers.encryption import Keyring, parse_keys

log = logging.getLogger(__name__)
_SETTING: Final = "encryption.keys_file"


class KeysFile(LiveFile[Keyring]):
    """Called for the present keys; says the names, never the keys, whenever they are read."""

    def __init__(self, path: Path) -> None:
        def parse(text: str) -> Keyring:
            keys = parse_keys(text, f"{_SETTING}: {path}")
            log.info("chunks are encrypted by key %r; keys that decrypt: %s", keys.writing, keys.names)
            return keys

        super().__init__(path, _SETTING, parse)
