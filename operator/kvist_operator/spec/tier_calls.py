"""How long an agent waits for a shared tier, and how much it asks of it at a time."""

from __future__ import annotations

from pydantic import Field

from kvist_operator.spec.base import Duration, Section


class TierCalls(Section):
    """Base of the sections of shared tiers; what is left out is the agent's own default."""

    lookup_deadline: Duration | None = Field(
        default=None,
        gt=0,
        le=60,
        description="Time that a lookup waits to learn what the tier has. Default: 100ms for Redis, 500ms "
        "for an object store.",
    )
    deadline: Duration | None = Field(
        default=None,
        gt=0,
        le=600,
        description="Time that reading or writing one chunk may take. Default: 2s for Redis, 10s for an "
        "object store.",
    )
    pause: Duration | None = Field(
        default=None,
        gt=0,
        le=3600,
        description="Time that a failing server is left alone. Default: 5s for Redis, 10s for an "
        "object store.",
    )
    concurrency: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="Chunks that each agent reads or writes at a time; more where one connection is slow. "
        "Default: 8.",
    )
