"""Copies between pages in device memory and the arena (CUDA). Placeholder body follows."""

from __future__ import annotations

from kvist_connector.transfer.base import PageCopier
from kvist_connector.transfer.pages import PageTable


class CudaCopier(PageCopier):
    def __init__(self, table: PageTable) -> None:
        raise NotImplementedError
