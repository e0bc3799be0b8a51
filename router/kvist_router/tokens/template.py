"""Chat templates, rendered as the engine renders them (transformers' environment, vLLM's message forms).

Called by tokenizer.py. What is not certainly equal raises NotExact with the reason; the
differential tests are tests/router/test_tokens_exact.py and tests/router/rendering.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from os import urandom
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvist_router.errors import NotExact
from kvist_router.tokens.content_form import takes_parts
from kvist_router.tokens.messages import engine_messages
from kvist_router.tokens.opaque import inserts_content
from kvist_router.tokens.variables import template_variables

# Fields of a chat request that change its tokens in ways only the engine knows.
_ENGINE_ONLY = frozenset({"chat_template", "mm_processor_kwargs", "media_io_kwargs"})
_DEVELOPER = ("'developer'", '"developer"')


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Conversation(NamedTuple):
    """What the engine gives to the template."""

    messages: list[dict[str, Any]]
    generate: bool  # whether the answer's head is added
    variables: dict[str, Any]  # tools, documents and keyword arguments that the template looks at
    continued: bool = False  # the last message is left open


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
        names = {node.name for node in root.find_all(jinja2.nodes.Name)}
        # Looking for them folds constants in the tree it is given.
        undeclared = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.variables = frozenset(undeclared | names & {"tools", "documents"})
        self._parts = takes_parts(root)
        self._developer = any(name in source for name in _DEVELOPER)
        self._continues = "content" in source
        self.inserts_content = not self._parts and inserts_content(root)

    def accept(self, fields: dict[str, Any]) -> Conversation:
        """What a chat request renders; raises NotExact when the engine may render something else."""
        if not _ENGINE_ONLY.isdisjoint(fields):
            for name in sorted(_ENGINE_ONLY):
                if fields.get(name) is not None:
                    raise NotExact(name)
        generate = _flag(fields, "add_generation_prompt", True)
        continued = _flag(fields, "continue_final_message", False)
        if continued and (generate or not self._continues):
            raise NotExact("continue_final_message")
        messages = engine_messages(fields["messages"], self._parts, self._developer)
        return Conversation(messages, generate, template_variables(fields, self.variables), continued)

    def render(self, conversation: Conversation) -> str:
        """Its text; raises NotExact when the template refuses it."""
        if not conversation.continued:
            return self._render(conversation)
        mark = urandom(16).hex() + " "
        messages, final = _marked(conversation.messages, mark)
        return _open_end(self._render(conversation._replace(messages=messages)), mark, final)

    def _render(self, conversation: Conversation) -> str:
        variables = {"tools": None, "documents": None, **self._special_tokens, **conversation.variables}
        try:
            return self._template.render(
                variables, messages=conversation.messages, add_generation_prompt=conversation.generate
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise NotExact("template refused") from error  # the engine says it in its own words


def _flag(fields: dict[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise NotExact(name)
    return value


def _marked(messages: list[dict[str, Any]], mark: str) -> tuple[list[dict[str, Any]], str]:
    """The messages with a mark behind the last text, and that text."""
    last = messages[-1]
    content = last["content"]
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + mark}], content
    if not content:
        raise NotExact("continue_final_message")
    text = content[-1]["text"]
    marked = [*content[:-1], {**content[-1], "text": text + mark}]
    return [*messages[:-1], {**last, "content": marked}], text


def _open_end(text: str, mark: str, final: str) -> str:
    """What stands before the mark; a template that trims contents has dropped the space before it too."""
    found = text.rfind(mark.rstrip())
    if found < 0 or final.strip() not in text:
        raise NotExact("continue_final_message")
    before = text[:found]
    return before if text.startswith(mark, found) else before.rstrip()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str, now: Callable[[], datetime] = datetime.now) -> str:
    return now().strftime(form)
