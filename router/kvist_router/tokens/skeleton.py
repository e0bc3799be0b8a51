"""A conversation's text in pieces, by its roles: what the template writes around contents is rendered once.

Called by tokenizer.py, for templates that only insert contents (opaque.py). A piece begins where an
added token stands in the template's own text; no other added token can overlap that one, so it
is found there whatever the contents are, and pieces tokenize independently.
"""

from __future__ import annotations

import re
from os import urandom
from typing import Any, NamedTuple

from kvist_router.tokens.lru import SizedLRU
from kvist_router.tokens.template import ChatTemplate, Conversation

CACHED_PARTS = 100_000  # of all skeletons together

Part = str | int  # text, or the number of the message whose content stands there


class Piece(NamedTuple):
    """Nearly always a text and one content."""

    begin: str
    number: int | None
    more: tuple[Part, ...]

    @classmethod
    def of(cls, parts: list[Part]) -> Piece:
        """From its parts in a row."""
        begin, rest = (parts[0], parts[1:]) if isinstance(parts[0], str) else ("", parts)
        if rest and isinstance(rest[0], int):
            return cls(begin, rest[0], tuple(rest[1:]))
        return cls(begin, None, tuple(rest))


class Skeletons:
    """Skeletons of one template; `splitter` finds `added` tokens."""

    def __init__(self, template: ChatTemplate, splitter: re.Pattern[str], added: list[str]) -> None:
        self._template = template
        self._splitter = splitter
        self._added = added
        self._known: SizedLRU[tuple[object, ...], list[Piece]] = SizedLRU(CACHED_PARTS)

    def pieces(self, conversation: Conversation) -> list[str]:
        """Texts whose tokens, one after the other, are the conversation's; raises NotExact."""
        messages = conversation.messages
        shape = (conversation.generate, *[message["role"] for message in messages])
        skeleton = self._known.get(shape)
        if skeleton is None:
            skeleton = self._build(conversation)
            self._known.put(shape, skeleton, sum(2 + len(piece.more) for piece in skeleton) + len(shape))
        texts = []
        for begin, number, more in skeleton:
            text = begin if number is None else begin + messages[number]["content"]
            texts.append(text + _joined(more, messages) if more else text)
        return texts

    def _build(self, conversation: Conversation) -> list[Piece]:
        mark = urandom(16).hex()
        marked = [
            {"role": message["role"], "content": f"{mark}{number}."}
            for number, message in enumerate(conversation.messages)
        ]
        text = self._template.render(conversation._replace(messages=marked))
        skeleton: list[list[Part]] = [[]]
        for number, part in enumerate(re.split(mark + r"(\d+)\.", text)):
            if number % 2:
                skeleton[-1].append(int(part))
            else:
                _append(skeleton, self._cut(part))
        return [Piece.of(parts) for parts in skeleton if parts]

    def _cut(self, text: str) -> list[str]:
        """Split before the first added token that nothing can overlap; one cut per literal is enough."""
        for found in self._splitter.finditer(text):
            if all(_apart(found.group(), other) for other in self._added):
                return [text[: found.start()], text[found.start() :]]
        return [text]


def _joined(parts: tuple[Part, ...], messages: list[dict[str, Any]]) -> str:
    return "".join([part if isinstance(part, str) else messages[part]["content"] for part in parts])


def _append(skeleton: list[list[Part]], texts: list[str]) -> None:
    if texts[0]:
        skeleton[-1].append(texts[0])
    skeleton += [[text] for text in texts[1:]]


def _apart(one: str, other: str) -> bool:
    """Whether no occurrence of `other` can overlap one of `one`, but for being the same."""
    if one == other:
        return not any(one[-size:] == one[:size] for size in range(1, len(one)))
    if one in other or other in one:
        return False
    return not any(
        one[-size:] == other[:size] or other[-size:] == one[:size]
        for size in range(1, min(len(one), len(other)))
    )
