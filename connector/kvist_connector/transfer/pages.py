"""The engine's KV pages as raw bytes: one or more strided byte tables per layer.

Built by engines.vllm.layout from the real tensors; read and written by the copiers.
A page of a layer is the concatenation of its parts' rows (K and V kept in separate
tensors are two parts); in the arena the parts of a page lie one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvist_connector.errors import UnsupportedError


@dataclass(frozen=True)
class LayerPages:
    """`parts[p][page]` are the bytes of one page: uint8 tensors [pages, bytes], rows dense."""

    name: str
    parts: tuple[torch.Tensor, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all parts."""
        return sum(int(part.shape[1]) for part in self.parts)


@dataclass(frozen=True)
class PageTable:
    """All layers of a rank, in the order they lie in a slot."""

    layers: tuple[LayerPages, ...]
    blocks: int  # engine pages of one chunk

    def __post_init__(self) -> None:
        if not self.layers or self.blocks < 1:
            raise UnsupportedError("the engine registered no KV layers")
        sizes = {layer.page_bytes for layer in self.layers}
        if len(sizes) != 1:
            raise UnsupportedError(
                f"layers have pages of different sizes {sorted(sizes)}; only equal sizes are supported"
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.layers[0].page_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one chunk of one layer."""
        return self.blocks * self.page_bytes

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.layers[0].parts[0].device
