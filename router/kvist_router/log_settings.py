"""Settings of the router's log. Part of settings.RouterSettings."""

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
