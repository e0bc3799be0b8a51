"""Section `cache.peers`: replicas that read each other's memory."""

from __future__ import annotations

from pydantic import Field

from kvist_operator.spec.base import Section


class Peers(Section):
    """Memory of the other replicas as one more tier."""

    enabled: bool = Field(
        default=False,
        description="true: replicas read chunks out of each other's memory, chunks can be moved between "
        "them, and a drain leaves the most valuable ones to the others where no tier is shared. A lookup "
        "asks every replica. Nothing with memory: 0. Default: false.",
    )
