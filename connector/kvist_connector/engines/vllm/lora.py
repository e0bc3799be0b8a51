"""What identifies a LoRA adapter: its name, a digest of its bytes, the revision that a user gave. Torch-free.

Two adapters of one name must never share KV. An adapter that vLLM fetches by its name has no folder here:
only the given revision tells its weights apart. Called by the scheduler half when a request with an adapter
arrives; digests are remembered per path and modification time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

MAX_REMEMBERED = 1024


class AdapterRevisions:
    """Of adapters; `given` are the revisions that the engine was started with, by the adapter's name."""

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        self._given = dict(given or {})
        self._digests: dict[tuple[tuple[str, int, int], ...], str] = {}

    def revision(self, adapter: LoRARequest) -> str | None:
        """None when there is nothing to tell the adapter by: its requests are not cached."""
        given = self._given.get(adapter.lora_name, "")
        content = self._content(adapter)
        return content if content is None or not given else f"{content}@{given}"

    def _content(self, adapter: LoRARequest) -> str | None:
        folder = Path(adapter.lora_path)
        if not adapter.lora_path or not folder.is_dir():
            return adapter.lora_path or None
        files = sorted(path for path in folder.iterdir() if path.is_file())
        stats = [(path, path.stat()) for path in files]
        state = tuple((str(path), status.st_size, status.st_mtime_ns) for path, status in stats)
        if state not in self._digests:
            if len(self._digests) >= MAX_REMEMBERED:
                self._digests.clear()
            self._digests[state] = _digest(files)
        return self._digests[state]


def _digest(files: list[Path]) -> str:
    digest = blake3()
    for path in files:
        digest.update(path.name.encode() + b"\0")
        digest.update_mmap(path)
    return digest.hexdigest(16)
