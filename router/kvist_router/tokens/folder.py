"""The files of a model folder that tokens depend on. Called by tokenizer.py, once at the start.

`own_code` says why the engine does not render with the folder's template at all: vLLM has code of its own
for some architectures, and takes Mistral's own tokenizer where the folder has it. `added_later` is a special
token that the engine adds to the tokenizer, since only the configuration names it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist_connector.errors import ConfigError

DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates, as transformers chooses them

_OWN_RENDERERS = {
    "DeepseekV32ForCausalLM": "DeepSeek V3.2",
    "DeepseekV4ForCausalLM": "DeepSeek V4",
    "DeepseekV4ForConditionalGeneration": "DeepSeek V4",
    "DeepseekV41ForCausalLM": "DeepSeek V4",
    "GptOssForCausalLM": "gpt-oss",
    "InklingForCausalLM": "Inkling",
    "InklingForConditionalGeneration": "Inkling",
    "KimiK3ForConditionalGeneration": "Kimi K3",
    "MoonshotKimiaForCausalLM": "Kimi Audio",
}
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ModelFolder:
    """What was read."""

    tokenizer: dict[str, Any]  # tokenizer.json
    config: dict[str, Any]  # tokenizer_config.json
    templates: dict[str, str]
    special_tokens: dict[str, str]
    unnamed: frozenset[str]  # special tokens that no file names: the engine's class may have a default
    own_code: str
    added_later: str


def read_folder(folder: Path) -> ModelFolder:
    """Raises ConfigError with the remedy."""
    tokenizer = _read_json(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json", optional=True)
    given = {**_read_json(folder / "special_tokens_map.json", optional=True), **config}
    special_tokens = _special_tokens(given)
    return ModelFolder(
        tokenizer,
        config,
        _templates(folder, config),
        special_tokens,
        frozenset(name for name in _SPECIAL if name not in given),
        _own_code(folder),
        _added_later(tokenizer, config, special_tokens),
    )


def _added_later(tokenizer: dict[str, Any], config: dict[str, Any], special_tokens: dict[str, str]) -> str:
    known = {token["content"] for token in tokenizer.get("added_tokens") or []}
    named = list(special_tokens.values())
    for more in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(more) or []
        named += listed.values() if isinstance(listed, dict) else listed
    named += [token.get("content", "") for token in (config.get("added_tokens_decoder") or {}).values()]
    return next((text for text in named if isinstance(text, str) and text and text not in known), "")


def _own_code(folder: Path) -> str:
    if any(folder.glob("consolidated*.safetensors")) and (
        (folder / "tekken.json").exists() or any(folder.glob("tokenizer.model.v*"))
    ):
        return "Mistral's own tokenizer"
    architectures = _read_json(folder / "config.json", optional=True).get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return next((_OWN_RENDERERS[name] for name in names if name in _OWN_RENDERERS), "")


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name; a file wins over tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    others = {path.stem: path.read_text() for path in folder.glob("additional_chat_templates/*.jinja")}
    if file.exists() or others:
        return {**others, DEFAULT: file.read_text()} if file.exists() else others
    source = config.get("chat_template")
    if isinstance(source, str):
        return {DEFAULT: source}
    if not isinstance(source, list):
        return {}
    return {item["name"]: item["template"] for item in source}


def _special_tokens(given: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL:
        value = given.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


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
