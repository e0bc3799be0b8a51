"""Settings of the router's log and traces. Part of settings.RouterSettings."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from kvist_connector.settings import Settings

LONGEST_BODY: Final = 16_384


class LogSettings(Settings):
    """What is logged, and how. Failed attempts at engines always are."""

    format: Literal["text", "json"] = Field(
        default="text", description="text: lines for people; json: an object a line"
    )
    requests: bool = Field(
        default=False,
        description="whether each request gets a line: id, tenant, client, replica, status, tokens, times",
    )
    bodies: bool = Field(
        default=False,
        description=f"whether that line holds the first {LONGEST_BODY} bytes of the request's body too: "
        "prompts are in it",
    )


class TracingSettings(Settings):
    """OpenTelemetry traces."""

    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://\S+$",
        description="where a collector takes OTLP over HTTP, such as http://collector:4318/v1/traces; needs "
        "the extra `tracing`; none: no traces",
    )
    ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of the traces begun here that are sent; clients decide for theirs",
    )
