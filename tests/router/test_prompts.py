"""Where tokens come from: here when an engine has agreed, else from the engine, counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from kvist_connector.protocol.engine import RequestRecord
from kvist_connector.protocol.feed import FEED_VERSION, Opening
from kvist_connector.protocol.tiers import Tier
from kvist_router.mind.interface import Metadata
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.feed import FakeAgent

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose tokens are bytes of the text."""
    alphabet = {chr(code): code for code in range(0x2000)}
    Tokenizer(models.BPE(vocab=alphabet, merges=[])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def as_folder(question: dict[str, Any]) -> list[int]:
    text = question.get("prompt") or "".join(item["content"] for item in question.get("messages", []))
    return [ord(letter) for letter in text if ord(letter) < 0x2000]


def chat(text: str, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()


def record_of(request: str, prompt: int, last: bytes) -> RequestRecord:
    return RequestRecord(
        request=request, prompt_tokens=prompt, last_chunk_key=last, hit_tokens={}, arrived=0.0,
        lookup_seconds=0.0, wait_seconds=0.0, load_seconds=0.0, prefill_seconds=0.1,
    )  # fmt: skip


async def decide(running: Any, body: bytes, path: Any = "chat") -> Any:
    decision = await running.mind.decide(body, Metadata(path))
    return running.mind.records.get(decision.id)


async def test_local_tokens_are_used_once_an_engine_agreed(router, until, folder: Path) -> None:
    async with FakeEngine() as engine:
        engine.tokens = as_folder
        running = await router(
            replicas=[{"url": engine.url}], model={"path": str(folder), "verify_cases": 20}
        )
        await until(lambda: not running.mind.source.problem)
        assert engine.tokenized == 20
        record = await decide(running, chat("abc"))
        assert (record.tokens_from, record.prompt_tokens) == ("local", 3)
        assert engine.tokenized == 20


async def test_an_engine_that_disagrees_is_asked_for_every_prompt(router, until, folder: Path) -> None:
    async with FakeEngine() as engine:
        engine.tokens = lambda question: [*as_folder(question), 7]
        running = await router(replicas=[{"url": engine.url}], model={"path": str(folder)})
        await until(lambda: "other tokens" in running.mind.source.problem)
        record = await decide(running, chat("abc"))
        assert (record.tokens_from, record.prompt_tokens) == ("remote", 4)


async def test_an_engine_that_differs_with_tools_alone_is_asked_for_those_alone(
    router, until, folder: Path
) -> None:
    (folder / "chat_template.jinja").write_text("{{ tools | length if tools else '' }}" + TEMPLATE)

    def other_tools(question: dict[str, Any]) -> list[int]:
        return [7, *as_folder(question)] if question.get("tools") else as_folder(question)

    async with FakeEngine() as engine:
        engine.tokens = other_tools
        running = await router(
            replicas=[{"url": engine.url}], model={"path": str(folder), "verify_cases": 40}
        )
        await until(lambda: not running.mind.source.unverified)
        assert running.mind.source.problem.startswith("with tools: ")
        tool = {"type": "function", "function": {"name": "f"}}
        record = await decide(running, chat("abc", tools=[tool]))
        assert (record.tokens_from, record.prompt_tokens) == ("remote", 4)
        assert (await decide(running, chat("abc"))).tokens_from == "local"


async def test_a_model_that_the_engine_renders_with_its_own_code_is_asked_of_it(
    router, until, folder: Path
) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    async with FakeEngine() as engine:
        engine.tokens = as_folder
        running = await router(replicas=[{"url": engine.url}], model={"path": str(folder)})
        await until(lambda: not running.mind.source.unverified)
        assert "code of its own (gpt-oss)" in running.mind.source.problem
        assert (await decide(running, chat("abc"))).tokens_from == "remote"
        body = json.dumps({"model": "m", "prompt": "abc"}).encode()
        assert (await decide(running, body, "completions")).tokens_from == "local"


@pytest.mark.parametrize(
    ("fields", "source", "tokens"),
    [
        ({"input": "abc"}, "local", 3),
        ({"input": "abc", "instructions": "de"}, "local", 5),
        ({"input": [{"role": "user", "content": "abc"}]}, "local", 3),
        ({"input": "abc", "previous_response_id": "resp_1"}, "unknown", 0),
        ({"input": "abcdefgh", "tools": [{"type": "web_search"}]}, "unknown", 4),
    ],
)
async def test_every_form_of_a_response_request(
    router, folder: Path, fields: dict[str, Any], source: str, tokens: int
) -> None:
    async with FakeEngine() as engine:
        engine.tokens = as_folder
        running = await router(replicas=[{"url": engine.url}], model={"path": str(folder), "verify_cases": 0})
        record = await decide(running, json.dumps({"model": "m", **fields}).encode(), "responses")
        assert (record.tokens_from, record.prompt_tokens) == (source, tokens)


@pytest.mark.parametrize("more", [{"suffix": "b"}, {"prompt_embeds": "AAAA"}])
async def test_a_prompt_that_the_engine_adds_to_has_no_keys(router, folder: Path, more) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], model={"path": str(folder), "verify_cases": 0})
        body = json.dumps({"model": "m", "prompt": "a" * 300, **more}).encode()
        record = await decide(running, body, "completions")
        assert (record.tokens_from, record.prompt_tokens) == ("unknown", 75)


async def test_a_prompt_that_the_engine_cuts_short_has_no_keys(router, folder: Path) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], model={"path": str(folder), "verify_cases": 0})
        body = json.dumps({"model": "m", "prompt": "a" * 300, "truncate_prompt_tokens": 299}).encode()
        record = await decide(running, body, "completions")
        assert (record.tokens_from, record.last_chunk_key) == ("unknown", "")
        body = json.dumps({"model": "m", "prompt": "a" * 300, "truncate_prompt_tokens": 300}).encode()
        assert (await decide(running, body, "completions")).tokens_from == "local"


async def test_an_engine_without_tokenize_cannot_disprove(router, until, folder: Path) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], model={"path": str(folder)})
        await until(lambda: not running.mind.source.problem)
        assert (await decide(running, chat("abc"))).tokens_from == "local"


async def test_what_the_engine_recorded_can_disprove_later(router, until, folder: Path) -> None:
    opening = Opening(
        version=FEED_VERSION, epoch=1, replica="r", fingerprint=b"f", group=0, model="m", chunk_tokens=256,
        block_tokens=32, gpu_known=False, draining=False,
    )  # fmt: skip
    async with FakeEngine() as engine, FakeAgent(opening, {Tier.MEMORY: []}) as agent:
        running = await router(
            replicas=[{"url": engine.url, "agent": agent.url}], model={"path": str(folder), "verify_cases": 0}
        )
        record = await decide(running, chat("a" * 300))
        agent.record(record_of(record.id, 300, bytes.fromhex(record.last_chunk_key)))
        await until(lambda: record.actual is not None)
        assert not running.mind.source.problem
        other = await decide(running, chat("b" * 300))
        agent.record(record_of(other.id, 301, bytes.fromhex(other.last_chunk_key)))
        await until(lambda: other.actual is not None)
        assert "the engine saw 301 tokens" in running.mind.source.problem


async def test_what_the_engine_recorded_of_a_chat_with_tools_disproves_those_alone(
    router, until, folder: Path
) -> None:
    opening = Opening(
        version=FEED_VERSION, epoch=1, replica="r", fingerprint=b"f", group=0, model="m", chunk_tokens=256,
        block_tokens=32, gpu_known=False, draining=False,
    )  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with FakeEngine() as engine, FakeAgent(opening, {Tier.MEMORY: []}) as agent:
        running = await router(
            replicas=[{"url": engine.url, "agent": agent.url}],
            model={"path": str(folder), "verify_cases": 0},
        )
        record = await decide(running, chat("a" * 300, tools=tools))
        assert record.beyond_plain == ["tools"]
        agent.record(record_of(record.id, 301, bytes.fromhex(record.last_chunk_key)))
        await until(lambda: "with tools: " in running.mind.source.problem)
        assert (await decide(running, chat("b" * 300))).tokens_from == "local"
        assert (await decide(running, chat("b" * 300, tools=tools))).tokens_from == "unknown"


@pytest.mark.parametrize(
    ("prompt", "source", "tokens"),
    [
        ("abc", "local", 3),
        (["abc", "de"], "local", 5),
        ([1, 2, 3, 4], "ids", 4),
        ([[1, 2], [3]], "ids", 3),
        ([-1], "unknown", None),
        ([1, "a"], "unknown", None),
        ([], "unknown", None),
    ],
)
async def test_every_form_of_a_completion_prompt(router, folder: Path, prompt, source, tokens) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], model={"path": str(folder), "verify_cases": 0})
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        record = await decide(running, body, "completions")
        assert record.tokens_from == source
        assert tokens is None or record.prompt_tokens == tokens


async def test_prompts_of_a_list_that_nobody_tokenizes_are_estimated(router, folder: Path) -> None:
    async with FakeEngine() as engine:
        engine.tokens = as_folder
        running = await router(replicas=[{"url": engine.url}])
        body = json.dumps({"model": "m", "prompt": [letter * 40 for letter in "abcdefghij"]}).encode()
        record = await decide(running, body, "completions")
        assert engine.tokenized == 4
        assert (record.tokens_from, record.prompt_tokens) == ("unknown", 4 * 40 + 6 * 10)


async def test_a_slow_tokenize_is_given_up_and_the_request_goes_on(router, folder: Path) -> None:
    async with FakeEngine() as engine:
        engine.tokenizing.clear()
        running = await router(replicas=[{"url": engine.url}], tokens={"remote_seconds": 0.1})
        assert (await decide(running, chat("abc"))).tokens_from == "unknown"
        engine.tokenizing.set()


async def test_fallbacks_are_counted_by_reason(router, http, folder: Path) -> None:
    async with FakeEngine() as engine:
        engine.tokens = as_folder
        running = await router(replicas=[{"url": engine.url}], model={"path": str(folder), "verify_cases": 0})
        assert (await decide(running, chat("abc", chat_template="x"))).tokens_from == "remote"
        async with http.get(running.admin_url + "/metrics") as answer:
            text = await answer.text()
        assert 'kvist_router_remote_tokenize_total{reason="chat_template"} 1.0' in text
