"""Tokens from an engine's /tokenize, where the local way is not exact. Counted by the caller.

Called by mind/prompts.py. One deadline per call; answers are kept in a bounded cache, since a
conversation sends its prefix again only as a new, longer text: what repeats is the whole body.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import aiohttp
import msgspec

from kvist_connector.keys import pack_tokens
from kvist_router.bounded import body_of
from kvist_router.tokens.lru import SizedLRU

CACHE_BYTES = 16 * 2**20
MAX_ANSWER_BYTES = 64 * 2**20
_CHAT_FIELDS = (
    "model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "media_io_kwargs", "mm_processor_kwargs", "tools",
)  # fmt: skip


class _Answer(msgspec.Struct):
    tokens: list[int]


class RemoteTokenizer:
    """Asks engines; None means that no answer came: the prompt is routed without keys."""

    def __init__(self, session: aiohttp.ClientSession, deadline: float) -> None:
        self._session = session
        self._deadline = deadline
        self._cache: SizedLRU[bytes, bytes] = SizedLRU(CACHE_BYTES)
        self._decoder = msgspec.json.Decoder(_Answer)

    async def chat(self, url: str, fields: dict[str, Any]) -> bytes | None:
        """Packed tokens of a chat request."""
        question = {name: fields[name] for name in _CHAT_FIELDS if fields.get(name) is not None}
        given = fields.get("chat_template_kwargs") or {}
        if not isinstance(given, dict):  # the engine refuses it in its own words
            return None
        kwargs = dict(given)
        effort = fields.get("reasoning_effort")
        if effort is not None:  # as vLLM's chat endpoint passes it to the template
            kwargs.setdefault("enable_thinking", effort != "none")
            kwargs["reasoning_effort"] = effort
        if fields.get("documents"):
            kwargs["documents"] = fields["documents"]
        if kwargs:
            question["chat_template_kwargs"] = kwargs
        return await self._ask(url, question)

    async def text(self, url: str, model: str | None, text: str, special: bool = True) -> bytes | None:
        """Packed tokens of one completion prompt."""
        question: dict[str, Any] = {"prompt": text, "add_special_tokens": special}
        if model is not None:
            question["model"] = model
        return await self._ask(url, question)

    async def _ask(self, url: str, question: dict[str, Any]) -> bytes | None:
        try:
            body = msgspec.json.encode(question)
        except (UnicodeEncodeError, ValueError):
            return None
        digest = hashlib.sha256(body).digest()
        known = self._cache.get(digest)
        if known is not None:
            return known
        try:
            async with asyncio.timeout(self._deadline):
                packed = await self._post(url + "/tokenize", body)
        except (
            aiohttp.ClientError,
            TimeoutError,
            OSError,
            msgspec.MsgspecError,
            OverflowError,
            RecursionError,
        ):
            return None
        if packed is not None:
            self._cache.put(digest, packed, len(packed) + 200)
        return packed

    async def _post(self, url: str, body: bytes) -> bytes | None:
        headers = {"content-type": "application/json"}
        async with self._session.post(url, data=body, headers=headers) as answer:
            if answer.status != 200:
                return None
            return pack_tokens(self._decoder.decode(await body_of(answer, MAX_ANSWER_BYTES)).tokens)
