"""Messages of a chat request in the form in which the engine gives them to its template.

Called by template.py. vLLM validates a message against several typed forms, keeps the fields of the one that
fits best, joins or wraps parts of text and parses the arguments of tool calls. What is not known to come out
equal raises NotExact, and the engine is asked. Held to vLLM's own code by tests/router/rendering.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from kvist_router.errors import NotExact

Message = dict[str, Any]

_NULLS = frozenset({"refusal", "audio", "function_call"})  # of answers that clients send back as they came
_FIELDS = {
    "system": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "developer": frozenset({"role", "content", "name"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
    "assistant": frozenset(
        {"role", "content", "name", "tool_calls", "reasoning", "reasoning_content", "annotations"}
    )
    | _NULLS,
}
_BILLING = "x-anthropic-billing-header"  # a line that changes with every request: vLLM drops it


def engine_messages(messages: Sequence[Message], parts: bool, developer: bool) -> list[Message]:
    """The conversation; `parts`: contents are lists of parts, `developer`: the template knows that role."""
    if not parts and all(map(_plain, messages)):
        return list(messages)
    found = [_message(message, parts) for message in messages]
    if developer or not any(message["role"] == "developer" for message in found):
        return found
    return _merged([_as_system(message) for message in found])


def _plain(message: Message) -> bool:
    """Whether it stays as it is where contents are texts: most do."""
    role, content = message.get("role"), message.get("content")
    return (
        len(message) == 2
        and type(content) is str
        and (role in ("user", "assistant") or (role == "system" and not content.startswith(_BILLING)))
    )


def _message(message: Message, parts: bool) -> Message:
    if not parts and _plain(message):
        return message
    role = message.get("role")
    allowed = _FIELDS.get(role) if isinstance(role, str) else None
    if allowed is None or not allowed.issuperset(message):
        _unknown()
    content = message.get("content", "")
    texts = list(_texts(content, role == "assistant", parts))
    if role == "system":
        texts = list(_without_billing(texts))
    result = {"role": role, "content": _content(texts, parts, role == "tool")}
    if role == "assistant":
        _add_answer(result, message)
    elif "tool_call_id" in message:
        result["tool_call_id"] = _string(message["tool_call_id"])
    if "name" in message:
        result["name"] = _string(message["name"])
    if role == "developer":
        result["tools"] = None
    return result


def _texts(content: Any, empty: bool, parts: bool) -> Iterator[str]:
    if content is None and empty:
        return
    for part in [content] if isinstance(content, str) else _list(content):
        if isinstance(part, str):
            yield part
            continue
        # A mark for a cache has no meaning to a template that gets one string.
        known = {"type", "text"} if parts else {"type", "text", "cache_control"}
        if not isinstance(part, dict) or not known.issuperset(part) or part.get("type") != "text":
            _unknown()
        yield _string(part.get("text"))


def _content(texts: list[str], parts: bool, tool: bool) -> str | list[Message]:
    if not parts:
        return "\n".join(text for text in texts if text)
    if tool and texts:
        return "\n".join(texts)
    return "" if tool else [{"type": "text", "text": text} for text in texts]


def _without_billing(texts: list[str]) -> Iterator[str]:
    for text in texts:
        rest = text.partition("\n")[2] if text.startswith(_BILLING) else text
        if rest or rest == text:
            yield rest


def _add_answer(result: Message, message: Message) -> None:
    """Tool calls and reasoning of an assistant's message."""
    if any(message.get(name) is not None for name in _NULLS):
        _unknown()
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [_call(call) for call in _list(calls)]
    reasoning = _reasoning(message)
    if reasoning is not None:
        _expect_one_form(message)
        result["reasoning"] = result["reasoning_content"] = reasoning


def _reasoning(message: Message) -> str | None:
    given = [message[name] for name in ("reasoning", "reasoning_content") if name in message]
    if len(given) == 2:
        _unknown()
    return None if not given or given[0] is None else _string(given[0])


def _expect_one_form(message: Message) -> None:
    """Refuse what OpenAI's own form of an answer may fit better than the one that has reasoning.

    The engine takes the form of which more fields are given, and drops what that one lacks; what decides a
    tie only the engine knows. Nulls fit the two differently, by what else is given.
    """
    if message.get("content", "") is None or _NULLS & message.keys():
        _unknown()


def _call(call: Any) -> Message:
    if not isinstance(call, dict) or not {"id", "type", "function", "index"}.issuperset(call):
        _unknown()
    function = call.get("function")
    if call.get("type") != "function" or not isinstance(function, dict) or len(function) != 2:
        _unknown()
    arguments = _arguments(_string(function.get("arguments")))
    # The order of members is that of the engine's types: a template may write a call as JSON.
    named = {"arguments": arguments, "name": _string(function.get("name"))}
    return {"id": _string(call.get("id")), "function": named, "type": "function"}


def _arguments(text: str) -> Message:
    try:
        parsed = json.loads(text) if text else {}
    except json.JSONDecodeError:
        return {}
    except (ValueError, RecursionError) as error:
        raise NotExact("message form") from error
    return parsed if isinstance(parsed, dict) else {}


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    kept = {name: value for name, value in message.items() if name != "tools"}
    return {**kept, "role": "system"}


def _merged(messages: list[Message]) -> list[Message]:
    """One system message in front, when there is one elsewhere."""
    systems = [message for message in messages if message["role"] == "system"]
    if len(systems) == 1 and messages[0] is systems[0]:
        return messages
    texts = [_flat(message["content"]) for message in systems]
    content = "\n\n".join(text for text in texts if text)
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": content}, *others]


def _flat(content: str | list[Message]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _string(value: Any) -> str:
    return value if isinstance(value, str) else _unknown()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else _unknown()


def _unknown() -> NoReturn:
    raise NotExact("message form")
