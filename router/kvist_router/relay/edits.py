"""The closed list of edits to a body; every other byte stays as the client sent it.

    cache_salt           set to the tenant's salt when the router has a cluster secret
    kvist                removed
    kv_transfer_params   set to {"tags": [..]} when `kvist` was given

Called by mind/mind.py, after the body was parsed: it is one valid JSON object without duplicate keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_PLAIN = re.compile(r"[^,}\]\s]+")
_INSIDE = re.compile(r'[^"{}\[\]]+')


def edit_body(body: bytes, tags: tuple[str, ...] | None, salt: str | None) -> bytes | None:
    """The body with the edits made, or None when there is none to make."""
    members: dict[str, object] = {}
    drop: set[str] = set()
    if salt is not None:
        drop.add("cache_salt")
        members["cache_salt"] = salt
    if tags is not None:
        drop.update(("kvist", "kv_transfer_params"))
        members["kv_transfer_params"] = {"tags": list(tags)}
    if not drop:
        return None
    text = body.decode()
    kept = [member for name, member in _members(text) if name not in drop]
    kept += [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in members.items()]
    start = text.index("{") + 1
    return (text[:start] + ",".join(kept) + "}").encode()


def _members(text: str) -> Iterator[tuple[str, str]]:
    """Name and exact text (surrounding space included) of each member of the object."""
    position = text.index("{") + 1
    while True:
        begin = position
        name_at = _skip(text, position)
        if text[name_at] == "}":
            return
        name_end = _end_of_string(text, name_at)
        value_at = _skip(text, _skip(text, name_end) + 1)
        end = _skip(text, _end_of_value(text, value_at))
        yield json.loads(text[name_at:name_end]), text[begin:end]
        if text[end] == "}":
            return
        position = end + 1


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _end_of_string(text: str, position: int) -> int:
    match = _STRING.match(text, position)
    if match is None:
        raise ValueError(f"no JSON string at {position}")
    return match.end()


def _end_of_value(text: str, position: int) -> int:
    if text[position] == '"':
        return _end_of_string(text, position)
    if text[position] not in "{[":
        match = _PLAIN.match(text, position)
        return match.end() if match else position
    depth = 0
    while True:
        character = text[position]
        if character == '"':
            position = _end_of_string(text, position)
            continue
        if character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            if depth == 0:
                return position + 1
        match = _INSIDE.match(text, position + 1)
        position = match.end() if match else position + 1
