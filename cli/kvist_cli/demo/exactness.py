"""The closing check: the same answer from every tier and from the engine's own prefix cache.

Called by the demo on one engine alone, one request at a time, past the router. Batch shapes change
bf16 results, so an answer is compared only with one that computed the same tokens: prompts are cut
to k chunks and 1..32 tokens, where the engine's own hit (whole blocks of 32) and a load
(whole chunks) have the same length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from kvist_cli.demo import sources
from kvist_cli.demo.errors import DemoError
from kvist_cli.demo.manifests import SERVED_NAME
from kvist_connector.keys import CHUNK_TOKENS

# Chunks to reuse and tokens beyond them, at most one engine block (32).
LENGTHS: Final = ((1, 1), (2, 32), (4, 7), (6, 19), (8, 31), (11, 12))
ANSWER_TOKENS: Final = 16
TOP_LOGPROBS: Final = 5
SOURCES: Final = ("gpu", "memory", "disk")


@dataclass(frozen=True)
class Answer:
    """Greedy tokens with their top logprobs, and where the reused prompt tokens came from."""

    text: str
    tokens: Any
    logprobs: Any
    hits: Mapping[str, int]

    def same(self, other: Answer) -> bool:
        """Bit-equal: text, tokens and logprobs; where they came from does not matter."""
        return (self.text, self.tokens, self.logprobs) == (other.text, other.tokens, other.logprobs)


@dataclass(frozen=True)
class Check:
    """One prompt: `answers` by the tier that was forced."""

    prompt_tokens: int
    expected_hit: int
    answers: Mapping[str, Answer]

    @property
    def problems(self) -> list[str]:
        """Why this prompt does not count as exact; empty when it does."""
        found = [
            f"{self.prompt_tokens} tokens: {self.expected_hit} from {tier} expected, got {dict(answer.hits)}"
            for tier, answer in self.answers.items()
            if answer.hits != {tier: self.expected_hit}
        ]
        reference = self.answers[SOURCES[0]]
        found += [
            f"{self.prompt_tokens} tokens: answer from {tier} differs from the engine's own"
            for tier, answer in self.answers.items()
            if not answer.same(reference)
        ]
        return found


@dataclass(frozen=True)
class Bench:
    """The engine under test with its agent."""

    engine: str
    agent: str
    client: httpx.Client

    def tokens(self, text: str) -> list[int]:
        """Token ids of plain text, as the engine cuts it."""
        answer = self._post("/tokenize", {"model": SERVED_NAME, "prompt": text})
        tokens: list[int] = answer["tokens"]
        return tokens

    def forget(self) -> None:
        """Drop the engine's own prefix cache; the connector's chunks stay."""
        self._post("/reset_prefix_cache", None)

    def answer(self, tokens: Sequence[int]) -> Answer:
        """Greedy continuation, with the tokens that were reused by tier."""
        before = sources.hits(self.client, self.agent)
        body = {
            "model": SERVED_NAME,
            "prompt": list(tokens),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "logprobs": TOP_LOGPROBS,
            "return_token_ids": True,
        }
        choice = self._post("/v1/completions", body)["choices"][0]
        hits = sources.next_hits(self.client, self.agent, before)
        return Answer(choice["text"], choice.get("token_ids"), choice["logprobs"], hits)

    def check(self, tokens: Sequence[int], expected_hit: int) -> Check:
        """Answer from every tier. The first request stores the chunks and is not compared."""
        self.forget()
        self.answer(tokens)
        answers = {"gpu": self.answer(tokens)}
        self.forget()
        answers["memory"] = self.answer(tokens)
        sources.flush(self.client, self.agent)
        sources.clear_memory(self.client, self.agent)
        self.forget()
        answers["disk"] = self.answer(tokens)
        return Check(len(tokens), expected_hit, answers)

    def _post(self, path: str, body: Any) -> dict[str, Any]:
        return sources.post(self.client, self.engine + path, body)


def prompts(tokens: Sequence[int]) -> list[tuple[list[int], int]]:
    """Prompts of the wanted lengths out of one long text, each from a place of its own, with its hit."""
    wanted = [(chunks * CHUNK_TOKENS + rest, chunks * CHUNK_TOKENS) for chunks, rest in LENGTHS]
    longest = max(length for length, _ in wanted)
    room = len(tokens) - longest
    if room < 0:
        raise DemoError(f"the closing check needs a text of {longest} tokens, the trace has {len(tokens)}")
    step = room // max(1, len(wanted) - 1)
    return [(list(tokens[i * step : i * step + length]), hit) for i, (length, hit) in enumerate(wanted)]
