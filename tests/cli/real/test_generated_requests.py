"""Requests made up from the engine's own description of its API get the same answer through the router."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

MODEL = "smol"
EXAMPLES = 40
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
# The router refuses what these would do, or they make an engine work for minutes: neither is compared.
LEFT_OUT = frozenset({
    "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "kvist", "structured_outputs",
    "response_format", "logits_processors", "prompt_embeds", "cache_salt", "request_id", "background",
    "store", "media_io_kwargs", "mm_processor_kwargs", "previous_response_id", "prompt_logprobs",
    "repetition_detection", "thinking_token_budget", "prompt_cache_key",
})  # fmt: skip
USER = {"role": "user", "content": "What did the sea bring?"}
TAME: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "The sea", "prompt_embeds": None},
    "/v1/responses": {"input": "The sea", "max_output_tokens": 2},
    "/tokenize": {"prompt": "The sea"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
# What is generated must not hang on how a batch was cut.
FIXED = {"max_tokens": 2, "max_completion_tokens": 2, "temperature": 0, "allowed_token_ids": [28], "n": 1}


def request(path: str, drawn: Any, keep: int) -> Any:
    """A drawn body, made harmless; with `keep` a third of its fields beside those that make it valid."""
    if not isinstance(drawn, dict):
        return drawn
    body = {name: value for name, value in drawn.items() if name not in LEFT_OUT}
    if keep:
        names = [name for number, name in enumerate(sorted(body)) if number % 3 == keep % 3]
        body = {name: body[name] for name in names} | TAME[path]
        body["model"] = MODEL
    if path in ("/v1/chat/completions", "/v1/completions"):
        body |= FIXED
    elif path == "/v1/responses":
        body |= {"max_output_tokens": 1, "temperature": 0}
    return body


def said(rig: Any, answer: httpx.Response) -> Any:
    """What an answer says, whatever its form."""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        return [rig.plain(json.loads(line)) for line in lines]
    try:
        return rig.plain(answer.json())
    except ValueError:
        return answer.text


@pytest.mark.parametrize("path", PATHS)
def test_generated_requests_are_answered_as_by_the_engine(rig: Any, path: str) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    rig.mirrored()
    engine = next(iter(rig.urls.engines.values()))
    document = rig.client.get(f"{engine}/openapi.json").json()
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    seen: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(), st.integers(0, 6))
    def compare(case: Any, keep: int) -> None:
        body = request(path, case.body, keep)
        try:
            data = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError):
            return
        headers = {"content-type": "application/json"}
        direct = rig.client.post(engine + path, content=data, headers=headers)
        routed = rig.client.post(rig.urls.router + path, content=data, headers=headers)
        seen[direct.status_code] += 1
        if direct.status_code >= 400:
            # What the router sees itself it says in its own words: a field is none, a prompt too long.
            assert routed.status_code in (direct.status_code, 400), (data, direct.text, routed.text)
            assert "error" in routed.json()
        else:
            assert routed.status_code == direct.status_code, (data, routed.text)
            assert said(rig, routed) == said(rig, direct), data

    compare()
    assert seen[200] > 0, seen
    rig.at_rest()
