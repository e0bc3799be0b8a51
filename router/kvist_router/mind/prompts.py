"""A request's prompts as packed tokens: here if that is exact, else from an engine. Called by mind.py.

Every fallback is counted by reason. Trust: a (model, template) whose tokens once disagreed with what
an engine reported is not rendered here again until the process restarts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvist_connector.keys import pack_tokens
from kvist_router.errors import NotExact
from kvist_router.metrics import MindMetrics
from kvist_router.tokens.keys import cut
from kvist_router.tokens.remote import RemoteTokenizer
from kvist_router.tokens.request import MAX_PROMPTS, Request
from kvist_router.tokens.tokenizer import ModelTokenizer

NOT_VERIFIED = "not verified yet"
MAX_REMOTE_PROMPTS = 4  # of one body that are sent to /tokenize; the others count as cold


class Prompt(msgspec.Struct, frozen=True):
    """Packed tokens of one prompt, whole and in segments (tokens/keys.py)."""

    packed: bytes
    segments: list[bytes]

    @classmethod
    def whole(cls, packed: bytes) -> Prompt:
        """Tokens that came in one piece."""
        return cls(packed, cut(packed))


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of a request; `source` is local, remote, ids or unknown."""

    each: tuple[Prompt, ...]
    source: str


class PromptSource:
    """Tokens of requests, by the local tokenizer or an engine."""

    def __init__(
        self, local: ModelTokenizer | None, remote: RemoteTokenizer, metrics: MindMetrics, verify: bool
    ) -> None:
        self._local = local
        self._remote = remote
        self._metrics = metrics
        self._problem = NOT_VERIFIED if verify else ""

    @property
    def local(self) -> ModelTokenizer | None:
        """The tokenizer of the model folder."""
        return self._local

    @property
    def problem(self) -> str:
        """Why prompts are not tokenized here; empty when they are."""
        return "no model.path" if self._local is None else self._problem

    @property
    def unverified(self) -> bool:
        """Whether the differential cases are still to come."""
        return self._local is not None and self._problem == NOT_VERIFIED

    def trust(self) -> None:
        """The differential cases agreed. What an engine disproved before stays disproved."""
        if self._problem == NOT_VERIFIED:
            self._problem = ""

    def distrust(self, problem: str) -> None:
        """An engine saw other tokens: ask it from now on."""
        self._problem = problem

    async def prompts(self, request: Request, url: str) -> Prompts:
        """Packed tokens of every prompt; empty and `unknown` when nobody can say."""
        if request.path == "chat":
            return await self._chat(request, url)
        prompt = request.fields.get("prompt")
        if isinstance(prompt, str):
            return await self._texts(request, [prompt], url)
        if not isinstance(prompt, list) or not prompt:
            return Prompts((), "unknown")
        if all(isinstance(item, str) for item in prompt):
            return await self._texts(request, prompt[:MAX_PROMPTS], url)
        return _ids(prompt if isinstance(prompt[0], list) else [prompt])

    def _trusted(self) -> ModelTokenizer:
        if self._local is None:
            raise NotExact("no model.path")
        if self._problem:
            raise NotExact("not verified" if self._problem == NOT_VERIFIED else "disproved")
        return self._local

    async def _chat(self, request: Request, url: str) -> Prompts:
        try:
            segments = await self._trusted().chat(request.fields)
            return Prompts((Prompt(b"".join(segments), segments),), "local")
        except NotExact as reason:
            self._metrics.remote_tokenize(str(reason))
        packed = await self._remote.chat(url, request.fields)
        return Prompts((), "unknown") if packed is None else Prompts((Prompt.whole(packed),), "remote")

    async def _texts(self, request: Request, texts: list[str], url: str) -> Prompts:
        special = request.fields.get("add_special_tokens", True)
        try:
            local = self._trusted()
            if special is not True or request.fields.get("truncate_prompt_tokens") is not None:
                raise NotExact("special tokens")
            found = [await local.text(text) for text in texts]
            return Prompts(tuple(Prompt(b"".join(segments), segments) for segments in found), "local")
        except NotExact as reason:
            self._metrics.remote_tokenize(str(reason))
        answers = [
            await self._remote.text(url, request.model, text, special is not False)
            for text in texts[:MAX_REMOTE_PROMPTS]
        ]
        known = tuple(Prompt.whole(answer) for answer in answers if answer is not None)
        return Prompts(known, "remote" if len(known) == len(texts) else "unknown")


def _ids(prompts: list[Any]) -> Prompts:
    try:
        packed = tuple(Prompt.whole(pack_tokens(prompt)) for prompt in prompts[:MAX_PROMPTS])
        return Prompts(packed, "ids")
    except (TypeError, OverflowError, ValueError):  # the engine says what is wrong with them
        return Prompts((), "unknown")
