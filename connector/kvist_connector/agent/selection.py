"""Which chunks a control means: by tokens, keys, tag, or all of them.

Texts and messages are rendered and tokenized by the router, which asks agents with tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar

import msgspec

from kvist_connector.agent.catalog import Catalog
from kvist_connector.keys import KEY_BYTES, chunk_keys, root_key
from kvist_connector.protocol.engine import Layout

B = TypeVar("B", bound=msgspec.Struct)
OF_TOKENS: Final = ("salt", "lora", "lora_revision")


class RequestError(ValueError):
    """The caller's body is wrong; `field` names the part."""

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


class Selector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of tokens, keys, tag and all; adapter and salt go with tokens."""

    tokens: list[int] | None = None
    keys: list[str] | None = None
    tag: str | None = None
    all: bool = False
    lora: str = ""
    lora_revision: str = ""
    salt: str = ""
    text: Any = None
    messages: Any = None


def typed(body: dict[str, Any], kind: type[B]) -> B:
    """The body as a struct; raises RequestError."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        raise RequestError(text, text.rpartition("`$.")[2].rstrip("`") if "`$." in text else None) from error


def given(selector: Selector) -> str:
    """The name of the one way that was used to select; empty for none. Raises RequestError for several."""
    if selector.text is not None or selector.messages is not None:
        field = "text" if selector.text is not None else "messages"
        raise RequestError(f"{field}: an agent has no tokenizer; ask the router's admin port", field)
    used = [name for name in ("tokens", "keys", "tag") if getattr(selector, name) is not None]
    used += ["all"] * selector.all
    if len(used) > 1:
        raise RequestError(f"give only one of {', '.join(used)}", used[1])
    # Not left out of account: `clear` of an adapter alone would be `clear` of everything.
    if used != ["tokens"] and (lost := [name for name in OF_TOKENS if getattr(selector, name)]):
        raise RequestError(
            f"{lost[0]} is part of a prompt's keys: give it with tokens, or leave it out", lost[0]
        )
    return used[0] if used else ""


def select(selector: Selector, catalog: Catalog, layout: Layout | None) -> list[bytes]:
    """The keys, first chunks first; of tokens all full chunks, known here or not. Raises RequestError."""
    match given(selector):
        case "tokens":
            return token_keys(selector, layout)
        case "keys":
            return list(dict.fromkeys(parse_key(text) for text in selector.keys or ()))
        case "tag":
            return in_order(catalog, catalog.tagged(selector.tag or ""))
        case "all":
            return in_order(catalog, [chunk.key for chunk in catalog.chunks()])
        case _:
            raise RequestError("say which chunks: give one of tokens, keys, tag, all", "tokens")


def token_keys(selector: Selector, layout: Layout | None) -> list[bytes]:
    """Keys of the full chunks of the tokens; none before an engine has told its layout."""
    if layout is None:
        return []
    root = root_key(
        layout.fingerprint,
        group=layout.group,
        lora=selector.lora,
        lora_revision=selector.lora_revision,
        salt=selector.salt,
    )
    try:
        return chunk_keys(root, selector.tokens or [], layout.chunk_tokens)
    except OverflowError as error:
        raise RequestError("token ids lie between 0 and 4294967295", "tokens") from error


def in_order(catalog: Catalog, keys: Iterable[bytes]) -> list[bytes]:
    """Known keys, parents before their children."""
    found = [chunk for chunk in map(catalog.get, keys) if chunk is not None]
    return [chunk.key for chunk in sorted(found, key=lambda chunk: chunk.index)]


def with_descendants(catalog: Catalog, keys: Iterable[bytes]) -> list[bytes]:
    """Known keys and all that hangs on them, parents first: without its parent a chunk is never found."""
    children: dict[bytes, list[bytes]] = {}
    for chunk in catalog.chunks():
        children.setdefault(chunk.parent, []).append(chunk.key)
    found, open_keys = set(keys), list(keys)
    while open_keys:
        for child in children.get(open_keys.pop(), ()):
            if child not in found:
                found.add(child)
                open_keys.append(child)
    return in_order(catalog, found)


def parse_key(text: str) -> bytes:
    """A chunk's key from hexadecimal."""
    try:
        key = bytes.fromhex(text)
    except ValueError as error:
        raise RequestError(f"{text!r} is not hexadecimal", "keys") from error
    if len(key) != KEY_BYTES:
        raise RequestError(f"{text!r} has {len(key)} bytes, a key has {KEY_BYTES}", "keys")
    return key
