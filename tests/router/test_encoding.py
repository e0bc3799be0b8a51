"""New text is encoded once, in order, off the loop when it is long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvist_connector.keys import pack_tokens
from kvist_router.errors import NotExact
from kvist_router.tokens.encoding import Encoder
from kvist_router.tokens.text_encoder import TextEncoder

INLINE = 100
LONG = "The quick brown fox jumps over the lazy dog. " * 40


class Held:
    """An encoder whose calls a test lets go on, one after the other."""

    def __init__(self, real: TextEncoder) -> None:
        self._real = real
        self.calls: list[tuple[list[str], bool]] = []  # pieces, and whether on the main thread
        self.go = threading.Semaphore(0)

    def packed(self, pieces: list[str]) -> list[bytes]:
        on_main = threading.current_thread() is threading.main_thread()
        self.calls.append((pieces, on_main))
        if not on_main:
            assert self.go.acquire(timeout=60)
        return self._real.packed(pieces)


@pytest.fixture
def real(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture
def made(smollm2: Path, real: Tokenizer) -> Callable[[], tuple[Encoder, Held, dict[str, bytes]]]:
    def make() -> tuple[Encoder, Held, dict[str, bytes]]:
        held, kept = Held(TextEncoder(smollm2 / "tokenizer.json", real)), {}
        return Encoder(held, INLINE, kept.update), held, kept  # type: ignore[arg-type]

    return make


async def test_short_text_is_encoded_at_once_and_long_text_in_a_thread(made, real: Tokenizer) -> None:
    encoder, held, kept = made()
    assert await encoder.encode({"a b"}) == {"a b": pack_tokens(real.encode("a b").ids)}
    held.go.release()
    assert await encoder.encode({LONG}) == {LONG: pack_tokens(real.encode(LONG).ids)}
    assert [on_main for _, on_main in held.calls] == [True, False]
    assert kept.keys() == {"a b", LONG}
    assert encoder.characters == 3 + len(LONG)


async def test_a_burst_of_one_new_text_encodes_it_once_and_short_text_does_not_wait(made) -> None:
    encoder, held, _ = made()
    burst = [asyncio.create_task(encoder.encode({LONG, f"{number}"})) for number in range(10)]
    await asyncio.sleep(0)
    assert (await encoder.encode({"short"})).keys() == {"short"}
    held.go.release()
    found = await asyncio.gather(*burst)
    assert [LONG in item for item in found] == [True] * 10
    assert sum(LONG in pieces for pieces, _ in held.calls) == 1


async def test_texts_are_encoded_in_the_order_in_which_they_came(made, monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    encoder, held, _ = made()
    texts = [f"{number} {LONG}" for number in range(100)]  # more than the threads' queue takes
    tasks = []
    for text in texts:
        tasks.append(asyncio.create_task(encoder.encode({text})))
        held.go.release()
    await asyncio.gather(*tasks)
    assert [pieces for pieces, _ in held.calls] == [[text] for text in texts]


async def test_what_was_begun_is_kept_though_its_client_left(made, until) -> None:
    encoder, held, kept = made()
    asking = asyncio.create_task(encoder.encode({LONG}))
    await until(lambda: bool(held.calls))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    held.go.release()
    await until(lambda: LONG in kept)


async def test_text_that_has_no_bytes_is_said_to_each_who_waits(made) -> None:
    encoder, held, kept = made()
    wrong = LONG + "\ud800"
    tasks = [asyncio.create_task(encoder.encode({wrong})) for _ in range(2)]
    held.go.release()
    for answer in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(answer, NotExact)
    assert kept == {}
