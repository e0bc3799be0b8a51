"""The engine's real KV tensors as pages of raw bytes; refuses, in words, what it does not understand.

Called by the worker half once, when the engine registers its KV caches. Nothing is
assumed about the inside of a page: shapes, strides and dtype say where a page's bytes lie,
and only whole pages are ever copied.
"""

from __future__ import annotations

import torch

from kvist_connector.errors import UnsupportedError
from kvist_connector.protocol.engine import VALUE_BYTES, Values
from kvist_connector.transfer.pages import LayerPages, PageTable

REMEDY = "start the engine without --kv-transfer-config, or report the model and backend"


def read_pages(
    kv_caches: dict[str, torch.Tensor], num_blocks: int, block_tokens: int, chunk_tokens: int
) -> PageTable:
    """Pages of every distinct layer, in the order the engine registered them."""
    if chunk_tokens % block_tokens:
        raise UnsupportedError(
            f"--block-size {block_tokens}: a chunk of {chunk_tokens} tokens is not a whole number of "
            f"blocks; use a block size that divides {chunk_tokens}"
        )
    layers: dict[tuple[int, ...], LayerPages] = {}
    for name, tensor in kv_caches.items():
        pages = layer_pages(name, tensor, num_blocks)
        layers.setdefault(_place(pages), pages)  # layers that share their KV register it twice
    return PageTable(tuple(layers.values()), chunk_tokens // block_tokens)


def layer_index(kv_caches: dict[str, torch.Tensor], table: PageTable) -> dict[str, int]:
    """Layer name -> position in the slot, also for layers that share another one's KV."""
    places = {_place(layer): index for index, layer in enumerate(table.layers)}
    num_blocks = int(table.layers[0].parts[0].shape[0])
    return {name: places[_place(layer_pages(name, t, num_blocks))] for name, t in kv_caches.items()}


def layer_pages(name: str, tensor: torch.Tensor, num_blocks: int) -> LayerPages:
    """`[pages, ...]`, `[2, pages, ...]` (K and V apart), or pages cut into equal kernel blocks."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"layer {name}: KV cache is a {type(tensor).__name__}, not a tensor; {REMEDY}")
    shape = tuple(tensor.shape)
    if num_blocks < 3:
        raise UnsupportedError(f"a KV space of {num_blocks} blocks is too small to tell its layout; raise it")
    if shape and shape[0] >= num_blocks and shape[0] % num_blocks == 0:
        return LayerPages(name, (_rows(name, tensor, num_blocks),))
    if len(shape) > 1 and shape[0] == 2 and shape[1] >= num_blocks and shape[1] % num_blocks == 0:
        return LayerPages(name, tuple(_rows(name, half, num_blocks) for half in tensor))
    raise UnsupportedError(
        f"layer {name}: KV cache of shape {shape} has no leading dimension of {num_blocks} blocks; {REMEDY}"
    )


def read_values(kv_caches: dict[str, torch.Tensor]) -> Values:
    """What the bytes of a page mean, equal in all layers; where it cannot be told, why."""
    found = [_values(name, tensor) for name, tensor in kv_caches.items()]
    alike = all(values == found[0] for values in found)
    return found[0] if found and alike else Values(problem="its layers have values of different kinds")


def describe(table: PageTable) -> str:
    """What of the layout makes bytes differ, equal on ranks and machines with the same layout."""
    layer = table.layers[0]
    parts = "+".join(str(int(part.shape[1])) for part in layer.parts)
    return f"{len(table.layers)} layers of {table.blocks} pages of {parts} bytes"


def _values(name: str, tensor: torch.Tensor) -> Values:
    """`[blocks, heads, tokens, K and V]`, in any order, or K and V in a dimension of their own."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if dtype not in VALUE_BYTES:
        return Values(dtype, 0, f"layer {name} has KV of {dtype}, known are {', '.join(VALUE_BYTES)}")
    joined = len(shape) == 4 and shape[-1] % 2 == 0
    apart = len(shape) == 5 and 2 in shape[:-1]
    if not (joined or apart) or tensor.stride(-1) != 1:
        return Values(dtype, 0, f"layer {name} has KV of shape {shape}, not heads with K and V side by side")
    return Values(dtype, shape[-1] // 2 if joined else shape[-1])


def _rows(name: str, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Bytes [num_blocks, page] of a tensor whose leading dimension counts (kernel) blocks."""
    ratio = tensor.shape[0] // num_blocks
    inner, size = tensor[0], tensor.element_size()
    if not _dense(inner):
        raise UnsupportedError(
            f"layer {name}: a page of shape {tuple(inner.shape)} with strides {inner.stride()} "
            f"has holes between its bytes; {REMEDY}"
        )
    block_bytes, stride = inner.numel() * size, tensor.stride(0) * size
    if ratio > 1 and stride != block_bytes:
        raise UnsupportedError(
            f"layer {name}: {ratio} kernel blocks make a page but do not lie side by side "
            f"(stride {stride}, size {block_bytes} bytes); {REMEDY}"
        )
    rows = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return rows.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        (num_blocks, ratio * block_bytes),
        (ratio * stride, 1),
    )


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one gapless range, in whatever order of dimensions."""
    expected = 1
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, length in sorted(item for item in dimensions if item[1] != 1):
        if stride != expected:
            return False
        expected *= length
    return True


def _place(layer: LayerPages) -> tuple[int, ...]:
    return tuple(part.data_ptr() for part in layer.parts)
