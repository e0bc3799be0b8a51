"""Codecs on KV that a model really computed: size, and speed of both directions on one core.

    python -m bench.compression [--tokens 2048] [--chunk 256] [--stored FOLDER]

The text is this repository's own documentation; or the chunks are those of a disk tier. Ratios
and speeds of each codec are of the same chunks in one run; a tier gains from a codec only where
its bandwidth is below `helps below`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import blosc as blosc_library
from numcodecs.blosc import Blosc

from bench.prompts import model_folder
from kvist_connector.protocol.engine import Values
from kvist_connector.tiers.compression import compress, decompress
from kvist_connector.tiers.header import HEADER_BYTES
from kvist_connector.tiers.lossy import pack, unpack

_REPEATS = 3
_VALUES = Values("bfloat16", 64)
_CANDIDATES = (
    ("zstd-1 byte planes", "zstd", 1, Blosc.SHUFFLE),
    ("zstd-3 byte planes", "zstd", 3, Blosc.SHUFFLE),
    ("zstd-5 byte planes", "zstd", 5, Blosc.SHUFFLE),
    ("zstd-1 bit planes", "zstd", 1, Blosc.BITSHUFFLE),
    ("zstd-1 as it is", "zstd", 1, Blosc.NOSHUFFLE),
    ("lz4-1 byte planes", "lz4", 1, Blosc.SHUFFLE),
)


def kv_chunks(tokens: int, chunk: int) -> list[bytes]:
    """The model's KV of `tokens` tokens of prose, in chunks of raw 16-bit values."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder()
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path("docs").glob("*.md")))
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :tokens]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        layers = model(ids, use_cache=True, logits_to_keep=1).past_key_values.layers
    # Per layer and side [token][head][size], as pages hold them.
    sides = [side[0].transpose(0, 1).contiguous() for layer in layers for side in (layer.keys, layer.values)]
    return [
        b"".join(side[start : start + chunk].view(torch.uint16).numpy().tobytes() for side in sides)
        for start in range(0, tokens - chunk + 1, chunk)
    ]


def stored_chunks(folder: Path, count: int) -> list[bytes]:
    """Bodies of a disk tier's plain chunks of one size."""
    paths = sorted(folder.rglob("*.kvist"))[:count]
    bodies = [path.read_bytes()[HEADER_BYTES:] for path in paths]
    if not bodies:
        raise SystemExit(f"{folder} has no chunks (*.kvist): name the folder of a disk tier")
    return [body for body in bodies if len(body) == len(bodies[0])]


def seconds(work: Callable[[], object]) -> float:
    """Median of a few runs."""
    taken = []
    for _ in range(_REPEATS):
        start = time.thread_time()
        work()
        taken.append(time.thread_time() - start)
    return statistics.median(taken)


def report(chunks: list[bytes]) -> list[str]:
    """One line a codec."""
    blosc_library.use_threads = False  # as in the agent's threads
    size = sum(map(len, chunks))
    lines = [f"{len(chunks)} chunks of {len(chunks[0])} bytes; MB/s of raw bytes on one core"]
    for name, codec, level, shuffle in _CANDIDATES:
        blosc = Blosc(cname=codec, clevel=level, shuffle=shuffle)
        raw = [np.frombuffer(chunk, np.uint16) for chunk in chunks]
        packed = [blosc.encode(chunk) for chunk in raw]
        ratio = sum(map(len, packed)) / size
        encode = size / seconds(partial(_each, blosc.encode, raw)) / 1e6
        decode = size / seconds(partial(_each, blosc.decode, packed)) / 1e6
        # Reading R raw bytes: R/bandwidth without, ratio*R/bandwidth + R/decode with the codec.
        helps = (1 - ratio) * decode
        lines.append(_line(name, ratio, encode, decode, helps))
    return [*lines, *_lossy(chunks)]


def _line(name: str, ratio: float, encode: float, decode: float, helps: float) -> str:
    return (
        f"{name:20} stored {ratio:6.1%}  encode {encode:6.0f}  decode {decode:6.0f}  "
        f"helps below {helps:5.0f} MB/s"
    )


def _each(work: Callable[[Any], object], items: Sequence[Any]) -> None:
    for item in items:
        work(item)


def _lossy(chunks: list[bytes]) -> list[str]:
    """As the agent stores with fp8: rounded, then packed."""
    size = sum(map(len, chunks))
    rounded = [pack([chunk], _VALUES) or b"" for chunk in chunks]
    packed = [compress([body], 1) or body for body in rounded]
    raw = memoryview(bytearray(len(chunks[0])))
    body = memoryview(bytearray(len(rounded[0])))

    def restore(from_packed: bool) -> None:
        for plain, small in zip(rounded, packed, strict=True):
            if from_packed:
                decompress(small, [body])
            unpack(body if from_packed else plain, _VALUES, [raw])

    plain_encode = seconds(lambda: [pack([chunk], _VALUES) for chunk in chunks])
    more = seconds(lambda: [compress([each], 1) for each in rounded])
    lines = []
    for name, bodies, encode, decode in (
        ("fp8, lossy", rounded, plain_encode, seconds(partial(restore, False))),
        ("fp8 + zstd, lossy", packed, plain_encode + more, seconds(partial(restore, True))),
    ):
        ratio, speed = sum(map(len, bodies)) / size, size / decode / 1e6
        lines.append(_line(name, ratio, size / encode / 1e6, speed, (1 - ratio) * speed))
    return lines


def main() -> None:
    """See module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of prose; default 2048")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a chunk; default 256")
    parser.add_argument("--stored", type=Path, help="folder of a disk tier without compression")
    given = parser.parse_args()
    stored: Path | None = given.stored
    made = stored_chunks(stored, given.tokens // given.chunk) if stored else None
    print("\n".join(report(made or kv_chunks(given.tokens, given.chunk))))


if __name__ == "__main__":
    main()
