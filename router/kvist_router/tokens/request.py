"""A request body as the mind reads it. Called by mind/mind.py for every request.

The engine validates the rest; only what routing and the closed list of edits need is checked here.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn, TypeGuard

import msgspec

from kvist_connector.protocol.tags import RESERVED
from kvist_router.errors import Refused
from kvist_router.mind.interface import Path, Refusal

MAX_PROMPTS = 256  # prompts of one completions body that are looked at; the others count as cold
_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
MAX_TAGS, MAX_TAG_LENGTH = 16, 128


class Request(msgspec.Struct, frozen=True):
    """What routing needs of a body."""

    path: Path
    model: str | None
    stream: bool
    fields: dict[str, Any]  # the whole body
    salt: str  # the client's own cache salt
    tags: tuple[str, ...] | None  # of the top-level `kvist` object; None when it is absent
    copies: int  # `n`
    response: str = ""  # a stored response that this one asks for or goes on from


class _DuplicateKeyError(ValueError):
    pass


def stored(response: str) -> Request:
    """The question for a response that an engine keeps."""
    return Request("stored", None, False, {}, "", None, 1, response)


def parse(body: bytes, path: Path, separated: bool = False) -> Request:
    """The request in a body; raises Refused with the 400 to answer. `separated`: tenants are kept apart."""
    fields = _decode(body)
    if separated and path == "responses" and fields.get("request_id") is not None:
        # It names the stored response: one that is made up can be guessed, or be another's already.
        _refuse("request_id must be left out where there are tenants: engines name responses", "request_id")
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        _refuse("model must be a string", "model")
    _check_prompt(fields, path)
    _check_transfers(fields)
    salt = fields.get("cache_salt")
    if salt is not None and not _is_text(salt):
        _refuse("cache_salt must be a string of whole characters", "cache_salt")
    copies, before = fields.get("n"), fields.get("previous_response_id")
    return Request(
        path=path,
        model=model,
        stream=fields.get("stream") is True,
        fields=fields,
        salt=salt or "",
        tags=_tags(fields),
        copies=copies if type(copies) is int and copies > 0 else 1,
        response=before if path == "responses" and _is_text(before) else "",
    )


def _decode(body: bytes) -> dict[str, Any]:
    fields = _decode_fast(body)
    return _decode_carefully(body) if fields is None else fields


def _decode_fast(body: bytes) -> dict[str, Any] | None:
    """The object, or None when only the careful way can tell.

    Every member has one colon outside of strings, so a member that the decoder dropped as a
    duplicate shows as a colon too many. (Escaped colons would hide one: those go the careful way.)
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if type(fields) is not dict or (b"\\" in body and b"\\u003" in body):
        return None
    colons = len(body) - len(body.replace(b":", b""))  # several times as fast as count
    return fields if _colons(fields) == colons else None


def _colons(value: Any) -> int:
    """Colons that a value's JSON text has: one per member, and those in strings."""
    count, rest = 0, [value]
    while rest:
        item = rest.pop()
        kind = type(item)
        if kind is dict:
            count += len(item)
            for name, inner in item.items():
                if ":" in name:
                    count += name.count(":")
                if type(inner) is not str:
                    rest.append(inner)
                elif ":" in inner:
                    count += inner.count(":")
        elif kind is str:
            count += item.count(":")
        elif kind is list and not (item and type(item[0]) is int and set(map(type, item)) == {int}):
            rest += item
    return count


def _decode_carefully(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except _DuplicateKeyError as error:
        _refuse(f"the JSON object has the key {str(error)!r} twice", str(error), "duplicate_key")
    except RecursionError:
        _refuse("the JSON body is nested too deeply", None, "invalid_json")
    except ValueError as error:  # also UnicodeDecodeError
        _refuse(f"the body is not valid JSON: {error}", None, "invalid_json")
    if not isinstance(fields, dict):
        _refuse("the body must be a JSON object", None, "invalid_json")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key[:80])
            seen.add(key)
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_transfers(fields: dict[str, Any]) -> None:
    """Parameters of transfers name hosts that an engine then talks to, and what it does with their data.

    Engines take them as members of `vllm_xargs` too.
    """
    for name in _TRANSFERS:
        if fields.get(name) is not None:
            _refuse(f"{name} belongs to the cluster; use kvist: {{tags: [..]}} for tags", name)
    extra = fields.get("vllm_xargs")
    for name in extra if isinstance(extra, dict) else ():
        if name in _TRANSFERS:
            _refuse(f"vllm_xargs must not hold {name}: it belongs to the cluster", "vllm_xargs")


def _check_prompt(fields: dict[str, Any], path: Path) -> None:
    if path in ("responses", "embeddings"):
        # vLLM's embeddings take messages too, and prompts of several kinds: the engine says what is wrong.
        if path == "responses" and not isinstance(fields.get("input"), str | list):
            _refuse("input must be a string or a list of items", "input")
    elif path == "chat":
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            _refuse("messages must be a list with at least one message", "messages")
        if not {dict}.issuperset(map(type, messages)):
            _refuse("every message must be an object", "messages")
    elif path == "completions" and not isinstance(fields.get("prompt"), str | list):
        if fields.get("prompt_embeds") is not None:
            return
        _refuse("prompt must be a string, a list of strings, or token ids", "prompt")


def _tags(fields: dict[str, Any]) -> tuple[str, ...] | None:
    if "kvist" not in fields:
        return None
    given = fields["kvist"]
    if not isinstance(given, dict) or set(given) - {"tags"}:
        _refuse("kvist must be an object with the one field tags", "kvist")
    tags = given.get("tags", [])
    valid = isinstance(tags, list) and len(tags) <= MAX_TAGS
    if not valid or not all(_is_text(tag) and 0 < len(tag) <= MAX_TAG_LENGTH for tag in tags):
        _refuse(
            f"kvist.tags must be at most {MAX_TAGS} strings of 1..{MAX_TAG_LENGTH} characters", "kvist.tags"
        )
    if any(tag.startswith(RESERVED) for tag in tags):
        _refuse(f"kvist.tags must not begin with {' or '.join(RESERVED)}: the router says that", "kvist.tags")
    return tuple(tags)


def _is_text(value: object) -> TypeGuard[str]:
    """Whether it is a string that has bytes: JSON can spell half of a surrogate pair, UTF-8 cannot."""
    return isinstance(value, str) and (value.isascii() or not _SURROGATE.search(value))


def _refuse(message: str, param: str | None, code: str | None = None) -> NoReturn:
    raise Refused(Refusal(400, message, param=param, code=code))
