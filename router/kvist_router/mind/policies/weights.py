"""Parameters of the policies; part of settings.RouterSettings. docs/router.md has the formulas."""

from __future__ import annotations

from pydantic import Field

from kvist_connector.settings import Settings
from kvist_router.mind.choice import STANDSTILL, TIE_RATIO, TIE_SECONDS

BOUND = 1.25


class PolicyWeights(Settings):
    """Each belongs to one policy; the others do not look at it."""

    standstill: float = Field(
        default=STANDSTILL,
        ge=0,
        le=100,
        description="kvist, approximate: what a second in which an answer stands still counts, in seconds of "
        "waiting for a first token",
    )
    tie_ratio: float = Field(
        default=TIE_RATIO,
        ge=0,
        le=1,
        description="kvist, approximate: costs within this share of the least predicted TTFT are equal",
    )
    tie_seconds: float = Field(
        default=TIE_SECONDS,
        ge=0,
        le=60,
        description="kvist, approximate: and those within so many seconds of it",
    )
    bound: float = Field(
        default=BOUND,
        ge=1,
        le=1000,
        description="prefix-affinity: most requests in flight at a replica, in shares of the mean",
    )
