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
from kvist_router.tokens.estimate import estimated_tokens, multimodal
from kvist_router.tokens.keys import Prompt
from kvist_router.tokens.remote import RemoteTokenizer
from kvist_router.tokens.request import MAX_PROMPTS, Request
from kvist_router.tokens.responses import as_chat
from kvist_router.tokens.tokenizer import ModelTokenizer
from kvist_router.tokens.unusual import unusual

NOT_VERIFIED = "not verified yet"
MAX_REMOTE_PROMPTS = 4  # of one body that are sent to /tokenize; the others count as cold


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of a request; `source` is local, remote, ids, unknown or none (it has no prompt)."""

    each: tuple[Prompt, ...]
    source: str
    estimate: int = 0  # tokens of the prompts that nobody could tell
    used: frozenset[str] = frozenset()  # what a chat rendered here goes beyond plain messages (unusual.py)

    @property
    def tokens(self) -> int:
        """Of all prompts together."""
        return sum([prompt.tokens for prompt in self.each]) + self.estimate


class PromptSource:
    """Tokens of requests, by the local tokenizer or an engine."""

    def __init__(
        self, local: ModelTokenizer | None, remote: RemoteTokenizer, metrics: MindMetrics, verify: bool
    ) -> None:
        self._local = local
        self._remote = remote
        self._metrics = metrics
        self._problem = NOT_VERIFIED if verify else ""
        self._doubted: dict[str, str] = {}  # of the closed list of unusual.py: what was found

    @property
    def local(self) -> ModelTokenizer | None:
        """The tokenizer of the model folder."""
        return self._local

    @property
    def problem(self) -> str:
        """Why prompts are not tokenized here; empty when they are."""
        if self._local is None:
            return "no model.path"
        return self._problem or self._local.chat_problem or "; ".join(self._doubted.values())

    @property
    def unverified(self) -> bool:
        """Whether the differential cases are still to come."""
        return self._local is not None and self._problem == NOT_VERIFIED

    def trust(self) -> None:
        """The differential cases agreed. What an engine disproved before stays disproved."""
        if self._problem == NOT_VERIFIED:
            self._problem = ""

    def distrust(self, problem: str, used: frozenset[str] = frozenset()) -> None:
        """An engine saw other tokens: ask it from now on, or only for requests that use one of these."""
        if not used:
            self._problem = problem
        for name in used:
            self._doubted.setdefault(name, f"with {name}: {problem}")

    def doubts(self, fields: dict[str, Any]) -> bool:
        """Whether a chat request is one of those."""
        return bool(self._doubted) and not self._doubted.keys().isdisjoint(unusual(fields))

    async def prompts(self, request: Request, url: str, skimmed: bool = False) -> Prompts:
        """Packed tokens of every prompt; none, `unknown` and an estimate when nobody can say.

        `skimmed`: the request is without its long strings (relay/skim.py).
        """
        if request.path in ("tokens", "stored"):
            return Prompts((), "none")
        if skimmed:
            self._metrics.remote_tokenize("long body")
            return Prompts((), "unknown", estimated_tokens(request.fields))
        found, total = await self._known(request, url), _count(request)
        missing = total - len(found.each)
        if not missing:
            return found
        return msgspec.structs.replace(found, estimate=estimated_tokens(request.fields) * missing // total)

    async def _known(self, request: Request, url: str) -> Prompts:
        found = await self._whole(request, url)
        most = request.fields.get("truncate_prompt_tokens")
        if most is None or not found.each or _within(found.each, most):
            return found
        self._metrics.remote_tokenize("truncate_prompt_tokens")  # which side is cut is the engine's choice
        return Prompts((), "unknown")

    async def _whole(self, request: Request, url: str) -> Prompts:
        if request.path == "chat":
            return await self._chat(request, url)
        if request.path == "responses":
            return await self._response(request, url)
        if request.path == "embeddings":  # nothing of them is kept
            return Prompts((), "unknown")
        for name in ("suffix", "prompt_embeds"):  # put around the text, or in its place, by the engine
            if request.fields.get(name) is not None:
                self._metrics.remote_tokenize(name)
                return Prompts((), "unknown")
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
            local, used = self._trusted(), unusual(request.fields)
            if not self._doubted.keys().isdisjoint(used):
                raise NotExact("disproved")
            segments = await local.chat(request.fields)
            return Prompts((Prompt(segments),), "local", used=used)
        except NotExact as reason:
            self._metrics.remote_tokenize(str(reason))
        if multimodal(request.fields["messages"]):
            # The engine would prepare every picture, and keys of it depend on more than its tokens.
            return Prompts((), "unknown")
        packed = await self._remote.chat(url, request.fields)
        return Prompts((), "unknown") if packed is None else Prompts((Prompt.whole(packed),), "remote")

    async def _response(self, request: Request, url: str) -> Prompts:
        try:
            chat = as_chat(request.fields)
        except NotExact as reason:
            self._metrics.remote_tokenize(str(reason))
            return Prompts((), "unknown")
        return await self._chat(msgspec.structs.replace(request, path="chat", fields=chat), url)

    async def _texts(self, request: Request, texts: list[str], url: str) -> Prompts:
        special = request.fields.get("add_special_tokens", True) is not False
        try:
            local = self._trusted()
            encode = local.text if special else local.plain
            found = [await encode(text) for text in texts]
            return Prompts(tuple(map(Prompt, found)), "local")
        except NotExact as reason:
            self._metrics.remote_tokenize(str(reason))
        answers = [
            await self._remote.text(url, request.model, text, special) for text in texts[:MAX_REMOTE_PROMPTS]
        ]
        known = tuple(Prompt.whole(answer) for answer in answers if answer is not None)
        return Prompts(known, "remote" if len(known) == len(texts) else "unknown")


def _count(request: Request) -> int:
    """Prompts of a request."""
    prompt = request.fields.get("prompt") if request.path == "completions" else None
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt)
    return 1


def _ids(prompts: list[Any]) -> Prompts:
    try:
        packed = tuple(Prompt.whole(pack_tokens(prompt)) for prompt in prompts[:MAX_PROMPTS])
        return Prompts(packed, "ids")
    except (TypeError, OverflowError, ValueError):  # the engine says what is wrong with them
        return Prompts((), "unknown")


def _within(prompts: tuple[Prompt, ...], most: Any) -> bool:
    return isinstance(most, int) and all(prompt.tokens <= most for prompt in prompts)
