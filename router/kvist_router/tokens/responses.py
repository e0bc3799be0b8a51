"""A request to /v1/responses as the chat request that the engine makes of it. Called by mind/prompts.py.

Raises NotExact for what only the engine knows: history that it keeps, tools, items that are no messages.
Held to vLLM's own code by tests/router/rendering.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvist_router.errors import NotExact

_ENGINE_ONLY = frozenset({
    "previous_response_id", "previous_input_messages", "conversation", "prompt", "tools", "media_io_kwargs",
    "mm_processor_kwargs",
})  # fmt: skip
_ROLES = ("system", "developer", "user")  # no set: a client may give a role that has no hash


def as_chat(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of the chat request; raises NotExact."""
    for name in sorted(_ENGINE_ONLY):
        if fields.get(name):
            raise NotExact("responses")
    if fields.get("truncation", "disabled") != "disabled":
        raise NotExact("responses")
    chat: dict[str, Any] = {"messages": list(_messages(fields))}
    reasoning = fields.get("reasoning")
    if reasoning is not None:
        if not isinstance(reasoning, dict):
            raise NotExact("responses")
        chat["reasoning_effort"] = reasoning.get("effort")
    if fields.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = fields["chat_template_kwargs"]
    return chat


def _messages(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    instructions, given = fields.get("instructions"), fields["input"]
    if instructions:
        yield {"role": "system", "content": _string(instructions)}
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    if not given:
        raise NotExact("responses")
    for item in given:
        # An answer among them has a form of its own, and the last one may be one to go on with.
        if not isinstance(item, dict) or item.get("role") not in _ROLES or set(item) != {"role", "content"}:
            raise NotExact("responses")
        yield {"role": item["role"], "content": _string(item["content"])}


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise NotExact("responses")
    return value
