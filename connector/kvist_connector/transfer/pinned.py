"""A mapped region that the device may read and write directly (CUDA). Unverified, no device.

Registered in pieces, so that other work of the process gets a turn between them; the device
sees the region at the host's own addresses (unified addressing). Used by cuda.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvist_connector.errors import UnsupportedError

PIECE_BYTES = 256 * 1024 * 1024  # a multiple of the page
_PAGE = 4096
_MAPPED = 2  # cudaHostRegisterMapped


class PinnedRegion:
    """Registers at construction, on the caller's thread; raises UnsupportedError in words."""

    def __init__(self, region: npt.NDArray[np.uint8], device: torch.device) -> None:
        self._region = region
        self._device = device
        self._registered: list[int] = []
        start, length = region.ctypes.data, -(-region.nbytes // _PAGE) * _PAGE  # mapped to whole pages
        with torch.cuda.device(device):
            for offset in range(0, length, PIECE_BYTES):
                self._register(start + offset, min(PIECE_BYTES, length - offset))

    def device_bytes(self) -> torch.Tensor:
        """The region as a flat uint8 tensor on the device; valid until `release`."""
        return torch.as_tensor(_Exported(self._region), device=self._device)

    def release(self) -> None:
        """Unregister; no copy may be under way."""
        for address in self._registered:
            _runtime().cudaHostUnregister(address)
        self._registered.clear()

    def _register(self, address: int, length: int) -> None:
        error = int(_runtime().cudaHostRegister(address, length, _MAPPED))
        if error == 0:
            self._registered.append(address)
            return
        self.release()
        raise UnsupportedError(
            f"the arena cannot be pinned for the device (CUDA error {error}): raise the limit of locked "
            "memory (ulimit -l, or the pod's) or make the arena smaller"
        )


class _Exported:
    """Host memory under the interface by which torch takes device memory without a copy."""

    def __init__(self, region: npt.NDArray[np.uint8]) -> None:
        self._region = region

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self._region.shape,
            "typestr": "|u1",
            "data": (self._region.ctypes.data, False),
            "strides": None,
            "version": 3,
        }


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
