"""Chat templates, rendered as the engine renders them (transformers' environment, vLLM's message forms).

Called by tokenizer.py. What is not certainly equal raises NotExact with the reason; the
differential test is tests/router/test_tokens_exact.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvist_router.errors import NotExact
from kvist_router.tokens.opaque import inserts_content

# Fields of a chat request that change its tokens in ways only the engine knows.
_ENGINE_ONLY = frozenset({
    "tools", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort", "mm_processor_kwargs",
    "media_io_kwargs", "truncate_prompt_tokens", "continue_final_message", "add_special_tokens",
})  # fmt: skip
_ROLES = frozenset({"system", "user", "assistant"})
_BILLING = "x-anthropic-billing-header"  # vLLM strips it from system messages


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Conversation(NamedTuple):
    """Messages in the form that the engine gives to the template."""

    messages: list[dict[str, Any]]
    generate: bool  # whether the answer's head is added


class ChatTemplate:
    """A compiled template; `special_tokens` are bos_token, eos_token and so on."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens
        root = environment.parse(source)
        self._wraps_content = any(_loops_over_content(root))
        self.inserts_content = not self._wraps_content and inserts_content(root)

    def accept(self, fields: dict[str, Any]) -> Conversation:
        """What a chat request renders; raises NotExact when the engine may render something else."""
        if not _ENGINE_ONLY.isdisjoint(fields):
            for name in sorted(_ENGINE_ONLY):
                if fields.get(name) not in (None, False):
                    raise NotExact(name)
        generate = fields.get("add_generation_prompt", True)
        if not isinstance(generate, bool):
            raise NotExact("add_generation_prompt")
        return Conversation([self._message(message) for message in fields["messages"]], generate)

    def render(self, conversation: Conversation) -> str:
        """Its text; raises NotExact when the template refuses it."""
        try:
            return self._template.render(
                messages=conversation.messages,
                tools=None,
                documents=None,
                add_generation_prompt=conversation.generate,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise NotExact("template refused") from error  # the engine says it in its own words

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        role = message.get("role")
        if role not in _ROLES or len(message) != 2 or "content" not in message:
            raise NotExact("message form")
        content = message["content"]
        if type(content) is str:
            if role == "system" and _BILLING in content:
                raise NotExact("message form")
            if not self._wraps_content:
                return message
            return {"role": role, "content": [{"type": "text", "text": content}]}
        texts = list(_texts(content))
        if role == "system" and any(_BILLING in text for text in texts):
            raise NotExact("message form")
        if self._wraps_content:
            return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}
        return {"role": role, "content": "\n".join(text for text in texts if text)}


def _texts(content: Any) -> Iterator[str]:
    if not isinstance(content, list):
        raise NotExact("message form")
    for part in content:
        if not isinstance(part, dict) or set(part) != {"type", "text"}:
            raise NotExact("message form")
        if part["type"] != "text" or not isinstance(part["text"], str):
            raise NotExact("message form")
        yield part["text"]


def _loops_over_content(root: jinja2.nodes.Template) -> Iterator[bool]:
    """Whether the template iterates message content: vLLM then passes lists of parts ("openai" format)."""
    for loop in root.find_all(jinja2.nodes.For):
        if isinstance(loop.iter, jinja2.nodes.Name) and loop.iter.name == "content":
            yield True
        if isinstance(loop.iter, jinja2.nodes.Getattr) and loop.iter.attr == "content":
            yield True
        if isinstance(loop.iter, jinja2.nodes.Getitem) and isinstance(loop.iter.arg, jinja2.nodes.Const):
            yield loop.iter.arg.value == "content"


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str, now: Callable[[], datetime] = datetime.now) -> str:
    return now().strftime(form)
