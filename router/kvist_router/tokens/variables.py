"""What a chat request gives its template beside messages, as the engine does. Called by template.py.

Raises NotExact for what the engine might read otherwise. Held to vLLM's own code by tests/router/rendering.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from kvist_router.errors import NotExact

# Names with a meaning of their own in `chat_template_kwargs`: transformers' parameters.
_RESERVED = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self",
})  # fmt: skip
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def template_variables(fields: dict[str, Any], used: Set[str]) -> dict[str, Any]:
    """Variables by name, those alone that the template uses."""
    given = _keywords(fields)
    effort = fields.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in _EFFORTS:
            raise NotExact("reasoning_effort")
        given.setdefault("enable_thinking", effort != "none")
        given["reasoning_effort"] = effort
    if fields.get("tools") is not None:
        given["tools"] = _tools(fields["tools"])
    if fields.get("documents") is not None:
        given["documents"] = _documents(fields["documents"])
    return {name: value for name, value in given.items() if name in used and value not in (None, "auto")}


def _keywords(fields: dict[str, Any]) -> dict[str, Any]:
    given = fields.get("chat_template_kwargs")
    if given is None:
        return {}
    if not isinstance(given, dict) or not _RESERVED.isdisjoint(given):
        raise NotExact("chat_template_kwargs")
    # The request's own fields win over these two.
    own = ("add_generation_prompt", "continue_final_message")
    return {name: value for name, value in given.items() if name not in own}


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not tools:
        raise NotExact("tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    """With the members, and in the order, that the engine's types give them."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise NotExact("tools")
    name, description, parameters, strict = [function.get(field) for field in _FUNCTION_FIELDS]
    known = (
        isinstance(name, str)
        and isinstance(description, str | None)
        and isinstance(parameters, dict | None)
        and isinstance(strict, bool | None)
        and tool.get("defer_loading") is function.get("defer_loading") is None
    )
    if not known:
        raise NotExact("tools")
    described = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": described if strict is None else {**described, "strict": strict}}


def _documents(documents: Any) -> list[dict[str, str]]:
    if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
        raise NotExact("documents")
    if not all(isinstance(value, str) for document in documents for value in document.values()):
        raise NotExact("documents")
    return documents
