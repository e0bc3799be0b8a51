"""Which requests may go on at another replica when their engine dies in mid-answer.

Only where the rest of the answer can be asked for exactly: as token ids of prompt and answer so far, at
/v1/completions. What a field of the body would do there must be known, so those not listed here refuse it,
and so does a value that looks at more than the prompt: stop strings and penalties of the answer's own tokens,
several answers, log probabilities, tools, structured output. Pure; called by relay/app.py.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvist_router.mind.interface import Path

_COPIED: Final = (
    "model", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "user", "priority", "stream_interval", "cache_salt", "kvist",
)  # fmt: skip
_COUNTED: Final = ("max_tokens", "max_completion_tokens", "min_tokens")
_PROMPT: Final = {  # what makes the prompt, of whose token ids the engine tells
    "chat": frozenset(
        {"messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
         "add_special_tokens", "documents", "reasoning_effort", "parallel_tool_calls"}
    ),
    "completions": frozenset({"prompt", "add_special_tokens"}),
}  # fmt: skip
_NOTHING: Final = frozenset({b"null"})
_NEUTRAL: Final = {  # values, as JSON, that are the same as leaving the field out
    "n": frozenset({b"null", b"1"}),
    "best_of": frozenset({b"null", b"1"}),
    "echo": frozenset({b"null", b"false"}),
    "logprobs": frozenset({b"null", b"false"}),
    "top_logprobs": frozenset({b"null", b"0"}),
    "stop": frozenset({b"null", b"[]"}),
    "presence_penalty": frozenset({b"null", b"0", b"0.0"}),
    "frequency_penalty": frozenset({b"null", b"0", b"0.0"}),
    "tools": frozenset({b"null", b"[]"}),
    "tool_choice": frozenset({b"null", b'"none"'}),
    "response_format": frozenset({b"null", b'{"type":"text"}'}),
    "use_beam_search": frozenset({b"null", b"false"}),
    "include_stop_str_in_output": frozenset({b"null", b"false"}),
    "include_reasoning": frozenset({b"null", b"true"}),
}
_DEFAULT_MOST: Final = 16  # tokens of /v1/completions without max_tokens, as OpenAI has it
_ASKED: Final = b',"return_token_ids":true}'


class Continuable(msgspec.Struct, frozen=True):
    """A request that may go on elsewhere."""

    path: Path
    copied: dict[str, Any]  # fields that go along as they are
    most: int | None  # tokens of the whole answer; None: what the context has room for
    least: int
    body: bytes  # the client's, with token ids asked for


def continuable(body: bytes, path: Path) -> Continuable | None:
    """None where the answer could not go on exactly. What is wrong in a body the mind will say."""
    if path not in _PROMPT:
        return None
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("stream") is not True or not _known(fields, path):
        return None
    if not _plain(fields, path):
        return None
    most = fields.get("max_completion_tokens") or fields.get("max_tokens")
    if most is None and path == "completions":
        most = _DEFAULT_MOST
    least = fields.get("min_tokens") or 0
    if not isinstance(most, int | None) or not isinstance(least, int):
        return None
    copied = {name: fields[name] for name in _COPIED if fields.get(name) is not None}
    return Continuable(path, copied, most, least, body.rstrip()[:-1] + _ASKED)


def _known(fields: dict[str, Any], path: Path) -> bool:
    own = _PROMPT[path]
    for name, value in fields.items():
        if name in _COPIED or name in _COUNTED or name in own or name == "stream":
            continue
        if msgspec.json.encode(value) not in _NEUTRAL.get(name, _NOTHING):
            return False
    return True


def _plain(fields: dict[str, Any], path: Path) -> bool:
    """Whether the prompt is one of text only: of images the token ids say nothing."""
    if path == "completions":
        prompt = fields.get("prompt")
        return isinstance(prompt, str) or (
            isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
        )
    messages = fields.get("messages")
    return isinstance(messages, list) and all(
        isinstance(message, dict) and _text_only(message.get("content")) for message in messages
    )


def _text_only(content: object) -> bool:
    if not isinstance(content, list):
        return content is None or isinstance(content, str)
    return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
