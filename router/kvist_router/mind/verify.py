"""Are local tokens the engine's? Asks every engine that comes up, before and beside serving.

Called by app.py, supervised. Until the cases agree prompts are tokenized by the engine (prompts.py); one that
disagrees keeps it so, or, if it uses more than plain messages, for requests that use the same. An engine
without /tokenize cannot be asked: local tokens are then used, and checked request by request against the
connector's records.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from kvist_router.errors import NotExact
from kvist_router.mind.prompts import PromptSource
from kvist_router.mind.replica import Replica
from kvist_router.tokens.remote import RemoteTokenizer
from kvist_router.tokens.unusual import unusual

LOOK_SECONDS = 0.2
UNANSWERED = 5  # cases without an answer, one after the other, until the engine counts as one that cannot say
_PIECES = (
    *("hello", " world", "\n", "\n\n", "  ", "\t", "'s", "123", "4567", "def f(x):\n    return x\n"),
    *("é", "e\u0301", "\u200b", "\u65e5\u672c", "\U0001f642", "\u2026", "\u0130", "\u00df"),
    *("<", "|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "<|eot_id|>"),
)

_log = logging.getLogger(__name__)


_CALL = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": '{"é": [1, "x"]}'}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "finds <things>",
        "parameters": {"type": "object", "properties": {"é": {"type": "array"}}},
    },
}


def cases(count: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Bodies of every kind that is rendered here: completions, plain chats, chats with one thing more."""
    draw = Random(seed)

    def text() -> str:
        return "".join(draw.choices(_PIECES, k=draw.randrange(1, 24)))

    for number in range(count):
        if number % 4 == 3:
            yield {"prompt": text()}
            continue
        messages = [{"role": "system", "content": text()}] if draw.random() < 0.5 else []
        for turn in range(draw.randrange(1, 6)):
            messages.append({"role": ("user", "assistant")[turn % 2], "content": text()})
        fields = {"messages": messages, "add_generation_prompt": messages[-1]["role"] == "user"}
        yield _with_more(fields, number // 2 % 8, text())


def _with_more(fields: dict[str, Any], kind: int, text: str) -> dict[str, Any]:
    """Most cases stay as they are; the others get one of the things of unusual.py."""
    messages = fields["messages"]
    if kind == 0:
        return {**fields, "tools": [_TOOL]}
    if kind == 1:
        asked = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        result = {"role": "tool", "tool_call_id": "call-1", "content": text}
        return {"messages": [{"role": "user", "content": text}, asked, result]}
    if kind == 2:
        thought = {"role": "assistant", "content": text, "reasoning": "because"}
        return {"messages": [{"role": "user", "content": text}, thought, {"role": "user", "content": "so"}]}
    if kind == 3:
        begun = [*messages, {"role": "assistant", "content": text + "x"}]
        return {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    if kind == 4:
        return {**fields, "chat_template_kwargs": {"enable_thinking": False, "thinking": True}}
    return fields


class Verifier:
    """`replicas` is the mind's own map."""

    def __init__(
        self, replicas: Mapping[str, Replica], source: PromptSource, remote: RemoteTokenizer, count: int
    ) -> None:
        self._replicas = replicas
        self._source = source
        self._remote = remote
        self._count = count
        self._seen: dict[str, int] = {}

    async def run(self) -> None:
        """Verify every start of every engine."""
        while True:
            for replica in list(self._replicas.values()):
                if replica.healthy and self._seen.get(replica.name) != replica.starts:
                    self._seen[replica.name] = replica.starts
                    await self._verify(replica)
            for name in self._seen.keys() - self._replicas.keys():
                del self._seen[name]
            await asyncio.sleep(LOOK_SECONDS)

    async def _verify(self, replica: Replica) -> None:
        asked = silent = 0
        for fields in cases(self._count):
            if "messages" in fields and self._source.doubts(fields):
                continue
            equal = await self._equal(replica, fields)
            if equal is False and not self._differs(replica, fields):
                return
            asked += equal is True
            silent = silent + 1 if equal is None else 0
            if silent == UNANSWERED:
                _log.warning("%s does not answer /tokenize: local tokens are not verified", replica.name)
                break
        if asked:
            _log.info("local tokens agree with %s in %d cases", replica.name, asked)
        self._source.trust()

    def _differs(self, replica: Replica, fields: dict[str, Any]) -> bool:
        """Keep a difference in mind; whether plain messages are still to be tried."""
        problem = f"{replica.name}: other tokens for {str(fields)[:300]}"
        used = unusual(fields) if "messages" in fields else frozenset()
        _log.warning("local tokens are not the engine's, /tokenize is used from now on: %s", problem)
        self._source.distrust(problem, used)
        return bool(used)

    async def _equal(self, replica: Replica, fields: dict[str, Any]) -> bool | None:
        """None when either side cannot say."""
        local = self._source.local
        if local is None:
            return None
        model = next(iter(replica.models), None)
        try:
            if "prompt" in fields:
                ours = b"".join(await local.text(fields["prompt"]))
                theirs = await self._remote.text(replica.url, model, fields["prompt"])
            else:
                ours = b"".join(await local.chat(fields))
                theirs = await self._remote.chat(replica.url, {**fields, "model": model})
        except NotExact:
            return None
        return None if theirs is None else ours == theirs
