"""Tokens of one model folder, exactly as the engine derives them, or NotExact.

Called by mind/prompts.py and mind/verify.py. Packed tokens are little-endian u32 (kvist_connector.keys).
New text is encoded by encoding.py.
"""

from __future__ import annotations

from pathlib import Path
from sys import getsizeof
from typing import Any

from tokenizers import Tokenizer

from kvist_connector.keys import pack_tokens
from kvist_router.errors import NotExact
from kvist_router.tokens.encoding import Encoder, Tokens
from kvist_router.tokens.folder import DEFAULT, TOOL_USE, ModelFolder, read_folder
from kvist_router.tokens.lru import SizedLRU
from kvist_router.tokens.segments import exact_splitter, split_tokens
from kvist_router.tokens.skeleton import Skeletons
from kvist_router.tokens.template import ChatTemplate, Conversation
from kvist_router.tokens.text_encoder import TextEncoder

_ENTRY_BYTES = 250  # of a cache entry beside text and tokens


class ModelTokenizer:
    """Chat and completion prompts to packed tokens, with a bounded cache of segments."""

    def __init__(self, folder: Path, cache_bytes: int, inline_characters: int) -> None:
        files = read_folder(folder)
        file = folder / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._splitter = exact_splitter(files.tokenizer)
        self._encoder = Encoder(TextEncoder(file, self._tokenizer), inline_characters, self._keep)
        self._cache: SizedLRU[str, bytes] = SizedLRU(cache_bytes)
        self._own_code, self._added_later = files.own_code, files.added_later
        self._templates = _compiled(files)
        self._skeletons = {
            name: Skeletons(template, self._splitter, split_tokens(files.tokenizer))
            for name, template in self._templates.items()
            if template.inserts_content and self._splitter is not None
        }
        self._frame = self._special_frame(files.config)
        self.hits = 0
        self.misses = 0

    @property
    def chat_problem(self) -> str:
        """Why no chat prompt is rendered here; empty when some are."""
        if self._added_later:
            return f"the engine adds the special token {self._added_later!r}, which tokenizer.json has not"
        if self._own_code:
            return f"the engine renders chats with code of its own ({self._own_code})"
        return "" if self._templates else "the model folder has no chat template"

    @property
    def cache_size(self) -> int:
        """Bytes of the segment cache in use."""
        return self._cache.size

    @property
    def encoded_characters(self) -> int:
        """Of text that no segment was known for, so far."""
        return self._encoder.characters

    async def chat(self, fields: dict[str, Any]) -> list[bytes]:
        """Packed tokens of a chat request, in segments: those that were there before are the same objects."""
        if self._own_code or not self._templates:
            raise NotExact("engine's own code" if self._own_code else "no template")
        name = TOOL_USE if TOOL_USE in self._templates and fields.get("tools") is not None else DEFAULT
        if name not in self._templates:
            raise NotExact("no template")
        conversation = self._templates[name].accept(fields)
        segments = await self._encode(self._pieces(name, conversation))
        return self._framed(segments) if fields.get("add_special_tokens") else segments

    async def text(self, text: str) -> list[bytes]:
        """Packed tokens of one completion prompt, in segments."""
        return self._framed(await self._encode(self._cut(text)))

    async def plain(self, text: str) -> list[bytes]:
        """The same without special tokens."""
        return await self._encode(self._cut(text))

    def _pieces(self, name: str, conversation: Conversation) -> list[str]:
        skeletons = self._skeletons.get(name)
        if skeletons is not None and not conversation.variables and not conversation.continued:
            return skeletons.pieces(conversation)
        return self._cut(self._templates[name].render(conversation))

    def _framed(self, segments: list[bytes]) -> list[bytes]:
        if self._frame is None:
            raise NotExact("special tokens")
        before, after = self._frame
        return [piece for piece in (before, *segments, after) if piece]

    def _cut(self, text: str) -> list[str]:
        return self._splitter.split(text) if self._splitter is not None else [text]

    async def _encode(self, pieces: list[str]) -> list[bytes]:
        if self._added_later:
            raise NotExact("special tokens")
        pieces = list(filter(None, pieces))
        found = self._cache.get_all(pieces)
        if None in found:
            missing = {piece for piece, tokens in zip(pieces, found, strict=True) if tokens is None}
            fresh = await self._encoder.encode(missing)
            found = [
                fresh[piece] if tokens is None else tokens
                for piece, tokens in zip(pieces, found, strict=True)
            ]
            self.misses += len(missing)
        self.hits += len(pieces)
        return [tokens for tokens in found if tokens]

    def _keep(self, fresh: Tokens) -> None:
        for piece, tokens in fresh.items():
            self._cache.put(piece, tokens, getsizeof(piece) + getsizeof(tokens) + _ENTRY_BYTES)

    def _special_frame(self, config: dict[str, Any]) -> tuple[bytes, bytes] | None:
        """Tokens that `add_special_tokens` puts around a text; None when a probe does not tell."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                before, after = full[:start], full[start + len(plain) :]
                if self._config_agrees(config, before):
                    return pack_tokens(before), pack_tokens(after)
        return None

    def _config_agrees(self, config: dict[str, Any], before: list[int]) -> bool:
        # The engine's tokenizer class may rebuild the post-processor from this flag.
        wanted = config.get("add_bos_token")
        return wanted is None or bool(wanted) == bool(before)


def _compiled(files: ModelFolder) -> dict[str, ChatTemplate]:
    """Templates by name, without those that name a special token of which only the engine knows."""
    found = {name: ChatTemplate(source, files.special_tokens) for name, source in files.templates.items()}
    return {
        name: template for name, template in found.items() if files.unnamed.isdisjoint(template.variables)
    }
