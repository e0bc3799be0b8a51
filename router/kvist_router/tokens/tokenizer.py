"""Tokens of one model folder, exactly as the engine derives them, or NotExact.

Called by mind/tokens of the mind. Packed tokens are little-endian u32 (kvist_connector.keys).
Short new text is encoded on the loop; long text in a thread: `encode_batch_fast` releases the GIL there.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvist_connector.errors import ConfigError
from kvist_connector.keys import pack_tokens
from kvist_router.errors import NotExact
from kvist_router.tokens.lru import SizedLRU
from kvist_router.tokens.segments import exact_splitter, split_tokens
from kvist_router.tokens.skeleton import Skeletons
from kvist_router.tokens.template import ChatTemplate

_ENTRY_BYTES = 200  # of a cache entry beside text and tokens


class ModelTokenizer:
    """Chat and completion prompts to packed tokens, with a bounded cache of segments."""

    def __init__(self, folder: Path, cache_bytes: int, inline_characters: int) -> None:
        content = _read_json(folder / "tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json", optional=True)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._splitter = exact_splitter(content)
        self._inline = inline_characters
        self._cache: SizedLRU[str, bytes] = SizedLRU(cache_bytes)
        source = _template_source(folder, config)
        self._template = ChatTemplate(source, _special_tokens(config)) if source is not None else None
        self._skeletons = None
        if self._template is not None and self._template.inserts_content and self._splitter is not None:
            self._skeletons = Skeletons(self._template, self._splitter, split_tokens(content))
        self._frame = self._special_frame(config)
        self.hits = 0
        self.misses = 0

    async def chat(self, fields: dict[str, Any]) -> list[bytes]:
        """Packed tokens of a chat request, in segments: those that were there before are the same objects."""
        if self._template is None:
            raise NotExact("no template")
        conversation = self._template.accept(fields)
        if self._skeletons is not None:
            return await self._encode(self._skeletons.pieces(conversation))
        return await self._encode(self._cut(self._template.render(conversation)))

    async def text(self, text: str) -> list[bytes]:
        """Packed tokens of one completion prompt, in segments."""
        if self._frame is None:
            raise NotExact("special tokens")
        before, after = self._frame
        return [before, *await self._encode(self._cut(text)), after]

    def _cut(self, text: str) -> list[str]:
        return self._splitter.split(text) if self._splitter is not None else [text]

    async def _encode(self, pieces: list[str]) -> list[bytes]:
        get = self._cache.get
        found = [get(piece) if piece else b"" for piece in pieces]
        if None in found:
            missing = {piece for piece, tokens in zip(pieces, found, strict=True) if tokens is None}
            fresh = await self._encode_pieces(list(missing))
            found = [
                fresh[piece] if tokens is None else tokens
                for piece, tokens in zip(pieces, found, strict=True)
            ]
            self.misses += len(missing)
        self.hits += len(pieces)
        return [tokens for tokens in found if tokens]

    async def _encode_pieces(self, pieces: list[str]) -> dict[str, bytes]:
        if sum(map(len, pieces)) <= self._inline:
            packed = self._encode_now(pieces)
        else:
            packed = await asyncio.to_thread(self._encode_now, pieces)
        for piece, tokens in zip(pieces, packed, strict=True):
            self._cache.put(piece, tokens, 2 * len(piece) + len(tokens) + _ENTRY_BYTES)
        return dict(zip(pieces, packed, strict=True))

    def _encode_now(self, pieces: list[str]) -> list[bytes]:
        try:
            encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:  # lone surrogates have no UTF-8 form
            raise NotExact("text is not Unicode") from error
        return [pack_tokens(encoding.ids) for encoding in encodings]

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


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        loaded = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"model.path: {path} cannot be read ({error.strerror}); give a Hugging Face model folder"
        ) from error
    except ValueError as error:
        raise ConfigError(f"model.path: {path} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"model.path: {path} must hold a JSON object")
    return loaded


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    source = config.get("chat_template")
    return source if isinstance(source, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
