"""float8 with shared scales: rounded as torch rounds, once only, and never served as what was computed."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvist_connector.engines.vllm.layout import read_values
from kvist_connector.errors import IntegrityError
from kvist_connector.protocol.engine import VALUE_BYTES, Values
from kvist_connector.testing.chunk_store import key
from kvist_connector.tiers.coding import CODEC, FLOAT8, Coding
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.encryption import parse_keys
from kvist_connector.tiers.envelope import EnvelopeStore, LossyChunk
from kvist_connector.tiers.lossy import pack, packed_bytes, unpack

FINGERPRINT = b"f" * 32
DTYPES = {name: getattr(torch, name) for name in VALUE_BYTES}
# As a model's: the greatest of a run is some times the others.
KV = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).mul(3).to(torch.bfloat16)
BODY = KV.view(torch.uint8).numpy().tobytes()
SIZE = len(BODY)
VALUES = Values("bfloat16", 32)


def tensor_of(body, dtype):
    return torch.frombuffer(bytearray(body), dtype=DTYPES[dtype]).double()


def through(body, values):
    packed = pack([body], values)
    if packed is None:
        return None
    assert len(packed) == packed_bytes(len(body), values)
    buffer = bytearray(len(body))
    unpack(packed, values, [memoryview(buffer)[:6], memoryview(buffer)[6:]])
    return bytes(buffer)


def as_torch_rounds(body, values):
    """The same by torch: each run divided by the least power of two that fits, rounded, multiplied."""
    runs = tensor_of(body, values.dtype).reshape(-1, values.run)
    greatest = runs.abs().amax(1, keepdim=True)
    exponent = torch.frexp(greatest / 448.0).exponent
    exponent -= (torch.ldexp(torch.ones_like(greatest), exponent - 1) * 448 >= greatest).int()
    scale = torch.ldexp(torch.ones_like(greatest), exponent.clamp(min=-127))
    rounded = (runs / scale).float().to(torch.float8_e4m3fn).double() * scale
    most = float(torch.finfo(DTYPES[values.dtype]).max)
    return rounded.clamp(-most, most).to(DTYPES[values.dtype]).double().reshape(-1)


def test_every_bfloat16_is_rounded_as_torch_rounds():
    patterns = np.arange(1 << 16, dtype=np.uint16)
    finite = patterns[(patterns & 0x7F80) != 0x7F80].tobytes()
    for run in (1, 2, 32):
        values = Values("bfloat16", run)
        assert torch.equal(tensor_of(through(finite, values), "bfloat16"), as_torch_rounds(finite, values))


@given(st.sampled_from(sorted(VALUE_BYTES)), st.sampled_from([1, 2, 8]), st.data())
def test_runs_of_any_values_are_rounded_as_torch_rounds_and_only_once(dtype, run, data):
    size = VALUE_BYTES[dtype]
    raw = data.draw(arrays.arrays(np.uint8, st.integers(0, 20).map(lambda count: count * run * size)))
    values, body = Values(dtype, run), raw.tobytes()
    rounded = through(body, values)
    if not bool(torch.isfinite(tensor_of(body, dtype)).all() if body else True):
        assert rounded is None
        return
    if body:
        assert torch.equal(tensor_of(rounded, dtype), as_torch_rounds(body, values))
    assert through(rounded, values) == rounded


def test_a_value_is_at_most_a_sixteenth_off():
    values, before = Values("bfloat16", 32), tensor_of(BODY, "bfloat16")
    error = (tensor_of(through(BODY, values), "bfloat16") - before).abs()
    least = before.abs().reshape(-1, 32).amax(1, keepdim=True) / 2**15  # below it the steps are equal
    assert bool((error.reshape(-1, 32) <= (before.abs().reshape(-1, 32) / 16).maximum(least)).all())
    assert error.max() > 0


@given(st.binary(max_size=300), st.sampled_from(["bfloat16", "float8", ""]), st.integers(-1, 40))
def test_bytes_that_are_no_such_body_are_refused(garbage, dtype, run):
    values, buffer = Values(dtype, run), bytearray(128)
    if values.known and 128 % (2 * run) == 0 and len(garbage) == packed_bytes(128, values):
        return
    with pytest.raises(IntegrityError):
        unpack(garbage, values, [memoryview(buffer)])


@pytest.fixture
async def folder(tmp_path):
    """Stores of any coding over one folder."""
    with ThreadPoolExecutor(2) as threads:
        disk = await DiskStore.open(tmp_path / "disk", 1 << 24, "none", threads)

        def store(compression="fp8", values=VALUES, keys=None, **more):
            made = EnvelopeStore(disk, threads, Coding(compression, keys, **more))
            made.describe(values)
            return made

        yield store
        await disk.close()


async def put(store, body=BODY, number=1, lossy=False):
    half = len(body) // 2
    return await store.put_if_absent(
        [body[:half], body[half:]],
        fingerprint=FINGERPRINT,
        key=key(number),
        parent=key(0),
        index=0,
        lossy=lossy,
    )


async def get(store, size=SIZE, number=1):
    buffer = bytearray(size)
    view = memoryview(buffer)
    header = await store.get(FINGERPRINT, key(number), [view[: size // 3], view[size // 3 :]])
    return header, bytes(buffer)


RING = parse_keys("one " + "A" * 43 + "=", "keys")


@pytest.mark.parametrize("keys", [None, lambda: RING], ids=["plain", "encrypted"])
async def test_a_chunk_is_stored_in_half_and_says_that_it_is_lossy(folder, keys):
    store = folder(keys=keys)
    assert await put(store)
    header, body = await get(store)
    assert body == through(BODY, VALUES) != BODY
    assert (header.lossy, header.values, header.codec) == (True, VALUES, f"{FLOAT8}+{CODEC}")
    assert header.stored_bytes < 0.52 * len(BODY)
    # What reads need is in the chunk, whatever the reader's own engine has.
    assert (await get(folder(keys=keys, values=Values())))[1] == body


async def test_who_wants_exact_values_gets_none_and_is_told_why(folder):
    await put(folder())
    with pytest.raises(LossyChunk, match="rounded by compression fp8"):
        await get(folder("zstd"))
    # Nor one that was rounded elsewhere and is stored here as it was then.
    await put(folder("none"), number=2, lossy=True)
    with pytest.raises(LossyChunk):
        await get(folder("none"), number=2)
    header, body = await get(folder("none", exact=False), number=2)
    assert (header.lossy, header.codec, body) == (True, "", BODY)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
async def test_what_cannot_be_rounded_is_stored_as_it_is(folder, wrong):
    spoiled = KV.clone()
    spoiled[3, 3] = wrong
    body = spoiled.view(torch.uint8).numpy().tobytes()
    await put(folder(), body)
    header, stored = await get(folder("none"))
    assert (header.lossy, stored) == (False, body)


@pytest.mark.parametrize(
    ("caches", "found"),
    [
        ([torch.zeros(9, 2, 8, 64, dtype=torch.bfloat16)] * 2, Values("bfloat16", 32)),
        ([torch.zeros(9, 8, 2, 64, dtype=torch.float16).transpose(1, 2)], Values("float16", 32)),
        ([torch.zeros(2, 9, 8, 3, 32)], Values("float32", 32)),
        ([torch.zeros(9, 8, 576, dtype=torch.bfloat16)], "not heads with K and V side by side"),
        ([torch.zeros(9, 2, 8, 33, dtype=torch.bfloat16)], "not heads with K and V side by side"),
        ([torch.zeros(9, 2, 64, 8).transpose(2, 3)], "not heads with K and V side by side"),
        ([torch.zeros(9, 2, 8, 64, dtype=torch.uint8)], "KV of uint8, known are bfloat16"),
        ([torch.zeros(9, 2, 8, 64), torch.zeros(9, 2, 8, 32)], "values of different kinds"),
        ([], "values of different kinds"),
    ],
)
def test_what_values_are_is_read_from_the_tensors_or_said_not_to_be_known(caches, found):
    values = read_values({f"layer.{number}": cache for number, cache in enumerate(caches)})
    if isinstance(found, Values):
        assert values == found
    else:
        assert not values.known
        assert found in values.problem
