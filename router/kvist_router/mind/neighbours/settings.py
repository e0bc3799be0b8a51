"""How routers of one cluster find each other. Called by settings.py."""

from __future__ import annotations

from pydantic import Field, field_validator

from kvist_connector import names
from kvist_connector.settings import Settings
from kvist_router.urls import checked_url

MAX_NEIGHBOURS = 64


class NeighbourSettings(Settings):
    """Other routers of the same cluster."""

    host: str = Field(
        default="127.0.0.1", description="address where other routers read this one's dispatches"
    )
    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description=f"port for that, {names.PORT_ROUTER_NEIGHBOURS} in Kubernetes; none: it tells nobody",
    )
    urls: tuple[str, ...] = Field(
        default=(),
        max_length=MAX_NEIGHBOURS,
        description="YAML list of base URLs of the other routers' ports; a name may stand for many routers "
        "(a headless Service) and for this one too",
    )
    lookup_seconds: float = Field(
        default=5.0, gt=0, description="how often names are looked up, and deadline of a lookup, seconds"
    )
    silent_seconds: float = Field(
        default=5.0, gt=0, description="a stream without a frame for this long is connected anew, seconds"
    )

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(checked_url(url) for url in value)
