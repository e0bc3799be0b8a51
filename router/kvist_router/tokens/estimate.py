"""About how many tokens a request has whose tokens nobody can tell. Called by mind/prompts.py.

Counts the characters of its texts, and takes one size for every picture or sound: their bytes say nothing
of the tokens that they become.
"""

from __future__ import annotations

from typing import Any

TOKEN_CHARACTERS = 4
MEDIA_TOKENS = 1000
_PROMPT = ("messages", "tools", "prompt", "input", "instructions", "documents")
_TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


def estimated_tokens(fields: dict[str, Any]) -> int:
    """Of a request body."""
    characters = media = 0
    rest = [fields[name] for name in _PROMPT if name in fields]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, list):
            rest += item
        elif isinstance(item, dict):
            if has_media(item):
                media += 1
            else:
                rest += item.values()
        elif isinstance(item, int):
            characters += TOKEN_CHARACTERS  # a token id
    return characters // TOKEN_CHARACTERS + media * MEDIA_TOKENS


def has_media(part: dict[str, Any]) -> bool:
    """Whether this is a part of a content that is no text."""
    kind = part.get("type")
    return isinstance(kind, str) and kind not in _TEXTS and (kind in part or "uuid" in part)


def multimodal(messages: Any) -> bool:
    """Whether a message of a chat holds a picture, a sound or the like."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(isinstance(part, dict) and has_media(part) for part in content):
            return True
    return False
