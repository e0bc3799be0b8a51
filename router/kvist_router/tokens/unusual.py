"""What of a chat request goes beyond plain messages: the ways in which engines may differ.

Called by mind/prompts.py and mind/verify.py: where an engine's tokens are others for one of these, only
requests that use it are tokenized by the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_FIELDS = (
    "tools", "documents", "chat_template_kwargs", "reasoning_effort", "continue_final_message",
    "add_special_tokens",
)  # fmt: skip
_PLAIN = ("user", "assistant", "system")
_MEMBERS = ("tool_calls", "reasoning", "reasoning_content", "name")


def unusual(fields: dict[str, Any]) -> frozenset[str]:
    """Names of what a request uses; a closed list."""
    return frozenset(_uses(fields))


def _uses(fields: dict[str, Any]) -> Iterator[str]:
    for name in _FIELDS:
        if fields.get(name):
            yield name
    for message in fields["messages"]:
        if len(message) == 2 and type(message.get("content")) is str and message.get("role") in _PLAIN:
            continue
        if len(message) > 2:
            yield from (name for name in _MEMBERS if message.get(name))
        if type(message.get("content")) is not str:
            yield "parts"
        if message.get("role") == "developer":
            yield "developer"
