"""Chunks compressed and encrypted: bit for bit what was put in, or nothing at all."""

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_connector.errors import ConfigError, IntegrityError
from kvist_connector.testing.chunk_store import key
from kvist_connector.tiers.base import total_bytes
from kvist_connector.tiers.coding import Coding
from kvist_connector.tiers.compression import compress, decompress
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.encryption import parse_keys
from kvist_connector.tiers.envelope import EnvelopeStore, ForeignChunk, LockedChunk
from kvist_connector.tiers.gain import Gain
from kvist_connector.tiers.header import HEADER_BYTES, unpack_header
from kvist_connector.tiers.wrapper import WrapperStore

FINGERPRINT = b"f" * 32
# Like KV in bfloat16: few exponents, any mantissa.
BODY = b"".join(bytes([number * 37 % 256, 60 + number % 3]) for number in range(4096))
SIZE = len(BODY)
OLD, NEW = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))


@pytest.fixture
def keyring():
    def make(*lines):
        keys = parse_keys("\n".join(lines), "keys")
        return lambda: keys

    return make


@pytest.fixture
async def folder(tmp_path):
    """Stores of any coding over one folder."""
    with ThreadPoolExecutor(2) as threads:
        disk = await DiskStore.open(tmp_path / "disk", 1 << 24, "none", threads)
        yield lambda coding=None: EnvelopeStore(disk, threads, coding)
        await disk.close()


async def put(store, body=BODY, number=1):
    return await store.put_if_absent(
        [body[:1000], body[1000:]], fingerprint=FINGERPRINT, key=key(number), parent=key(0), index=0
    )


async def get(store, size=SIZE, number=1):
    buffer = bytearray(size)
    view = memoryview(buffer)
    header = await store.get(FINGERPRINT, key(number), [view[: size // 3], view[size // 3 :]])
    return header, bytes(buffer)


def file_of(tmp_path, number=1):
    return next((tmp_path / "disk").glob(f"??/{key(number).hex()}.kvist"))


@given(st.lists(st.binary(max_size=4000), max_size=4), st.integers(0, 16))
@settings(deadline=None, max_examples=60)
def test_compression_is_bit_exact(parts, zeros):
    parts = [*parts, bytes(zeros * 500)]
    raw = b"".join(parts)
    packed = compress(parts)
    if packed is None:
        return
    assert len(packed) < len(raw)
    buffer = bytearray(len(raw))
    decompress(packed, [memoryview(buffer)[:7], memoryview(buffer)[7:]])
    assert bytes(buffer) == raw


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
def test_bytes_that_are_no_frame_are_refused(garbage):
    with pytest.raises(IntegrityError):
        decompress(garbage, [memoryview(bytearray(64))])


CODINGS = {
    "plain": ("none", ()),
    "compressed": ("zstd", ()),
    "encrypted": ("none", (f"one {OLD}",)),
    "both": ("zstd", (f"one {OLD}",)),
}


@pytest.fixture(params=CODINGS)
def coding(request, keyring):
    compression, lines = CODINGS[request.param]
    return Coding(compression, keyring(*lines) if lines else None)


async def test_what_was_put_comes_back(folder, coding):
    store = folder(coding)
    assert await put(store)
    assert not await put(store)
    header, body = await get(store)
    assert body == BODY
    assert header.raw_bytes == len(BODY)
    noise = bytes(number * number * 31 % 251 for number in range(999))
    await put(store, noise, 2)
    assert (await get(store, len(noise), 2))[1] == noise


async def test_a_compressed_chunk_is_smaller_and_every_agent_reads_it(folder, tmp_path):
    await put(folder(Coding("zstd")))
    assert file_of(tmp_path).stat().st_size < HEADER_BYTES + len(BODY) * 0.8
    assert (await get(folder()))[1] == BODY


async def test_an_encrypted_chunk_hides_its_bytes(folder, tmp_path, keyring):
    await put(folder(Coding("none", keyring(f"one {OLD}"))))
    stored = file_of(tmp_path).read_bytes()
    assert BODY[:32] not in stored
    assert unpack_header(stored).key_id == "one"


@given(position=st.integers(0, 2**20), flip=st.integers(1, 255), grown=st.booleans())
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("kind", ["compressed", "both"])
def test_a_changed_byte_anywhere_is_never_served(tmp_path_factory, kind, position, flip, grown):
    async def check():
        root = tmp_path_factory.mktemp("flip")
        ring = parse_keys(f"one {OLD}", "keys")
        keys = (lambda: ring) if kind == "both" else None
        with ThreadPoolExecutor(1) as threads:
            disk = await DiskStore.open(root / "disk", 1 << 24, "none", threads)
            store = EnvelopeStore(disk, threads, Coding("zstd", keys))
            await put(store)
            path = file_of(root)
            data = bytearray(path.read_bytes())
            data[position % len(data)] ^= flip
            path.write_bytes(data + b"?" * grown)
            with pytest.raises(IntegrityError):
                await get(store)
            await disk.close()

    asyncio.run(check())


async def test_keys_rotate_without_losing_chunks(folder, keyring, tmp_path):
    await put(folder(Coding("none", keyring(f"old {OLD}"))))
    both = folder(Coding("none", keyring(f"new {NEW}", f"old {OLD}")))
    assert (await get(both))[1] == BODY
    await put(both, number=2)
    assert unpack_header(file_of(tmp_path, 2).read_bytes()).key_id == "new"
    only_new = folder(Coding("none", keyring(f"new {NEW}")))
    assert (await get(only_new, number=2))[1] == BODY
    with pytest.raises(LockedChunk, match="by key 'old', the key file has new"):
        await get(only_new)


async def test_without_the_key_nothing_is_served(folder, keyring):
    await put(folder(Coding("none", keyring(f"one {OLD}"))))
    with pytest.raises(LockedChunk, match=r"give encryption\.keys_file"):
        await get(folder())
    with pytest.raises(LockedChunk, match="another key of that name"):
        await get(folder(Coding("none", keyring(f"one {NEW}"))))


@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_a_plain_chunk_is_nobody_s_where_there_are_keys(folder, keyring, compression):
    await put(folder(Coding(compression)))
    with pytest.raises(ForeignChunk, match="not encrypted, and"):
        await get(folder(Coding("none", keyring(f"one {OLD}"))))


async def test_the_header_is_authenticated_with_the_body(folder, keyring, tmp_path):
    """A changed header with a right checksum of its own: whoever has no key cannot make one that passes."""
    import msgspec

    from kvist_connector.tiers.header import pack_header

    store = folder(Coding("none", keyring(f"one {OLD}")))
    await put(store)
    path = file_of(tmp_path)
    data = path.read_bytes()
    forged = msgspec.structs.replace(unpack_header(data), tags=("mine",))
    path.write_bytes(pack_header(forged) + data[HEADER_BYTES:])
    with pytest.raises(LockedChunk):
        await get(store)


async def test_no_nonce_is_used_twice(folder, keyring, tmp_path):
    store = folder(Coding("none", keyring(f"one {OLD}")))
    for number in range(1, 9):
        await put(store, number=number)
    bodies = [file_of(tmp_path, number).read_bytes()[HEADER_BYTES:] for number in range(1, 9)]
    assert len({body[:12] for body in bodies}) == 8
    assert len(set(bodies)) == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has 0 keys"),
        ("one", "a key of 0 bytes"),
        ("one !!!", "base64"),
        ("one c2hvcnQ=", "a key of 5 bytes"),
        (f"o/e {OLD}", "no key name"),
        (f"one {OLD}\none {NEW}", "line 2"),
    ],
)
def test_a_wrong_key_file_is_refused_in_words_without_the_key(keyring, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        keyring(*text.splitlines())
    assert OLD not in str(caught.value)


@pytest.mark.parametrize(("bandwidth", "pays"), [(50e6, True), (5e9, False)])
def test_auto_compresses_only_for_a_tier_that_is_slower_than_unpacking(bandwidth, pays):
    gain = Gain().wrote(int(bandwidth), 1.0)
    assert gain.compress_next  # nothing is known of compression yet
    gain = gain.packed(1000, 700).unpacked(1_000_000_000, 1.0)
    assert gain.worth is pays
    decisions = []
    for _ in range(128):
        decisions.append(gain.compress_next)
        gain = gain.wrote(int(bandwidth), 1.0)
    assert decisions.count(pays) == 112  # the other way now and then, so that both are read


@pytest.mark.parametrize(
    ("plain", "packed", "pays"), [(1.0, 0.8, True), (1.0, 0.95, False), (0.5, 1.0, False)]
)
@pytest.mark.parametrize("writing", [50e6, 5e9])
def test_auto_goes_by_reads_once_both_kinds_were_read(plain, packed, pays, writing):
    """Whatever the forecast from writes was, and a hair's breadth is no reason to compress."""
    gain = Gain().packed(1000, 700).unpacked(1_000_000_000, 1.0).wrote(int(writing), 1.0)
    forecast = gain.worth
    for number in range(8):
        assert gain.worth is forecast, number
        gain = gain.read(1_000_000, plain, packed=False).read(1_000_000, packed, packed=True)
    assert gain.worth is pays
    for _ in range(40):
        gain = gain.read(1_000_000, packed * 3, packed=True)
    assert not gain.worth


def test_auto_leaves_alone_what_does_not_shrink():
    gain = Gain().wrote(1000, 1.0).incompressible()
    assert not gain.worth


class TimedStore(WrapperStore):
    """Reads and writes take time by a clock of their own, at these rates."""

    def __init__(self, inner, reading, writing):
        super().__init__(inner)
        self.now = 0.0
        self.reading, self.writing = reading, writing

    def clock(self):
        self.now += 1e-6  # what unpacking takes, then
        return self.now

    async def get(self, read):
        length = await super().get(read)
        self.now += (length or 0) / self.reading
        return length

    async def put_if_absent(self, key, parts):
        self.now += total_bytes(parts) / self.writing
        return await super().put_if_absent(key, parts)


@pytest.mark.parametrize(
    ("reading", "writing", "packed"), [(1e6, 1e6, True), (1e12, 1e12, False), (1e12, 1e6, False)]
)
async def test_auto_packs_what_is_read_from_a_slow_tier(folder, reading, writing, packed):
    timed = TimedStore(folder().inner, reading, writing)
    with ThreadPoolExecutor(2) as threads:
        store = EnvelopeStore(timed, threads, Coding("auto", clock=timed.clock))
        codecs = []
        for number in range(1, 161):
            await put(store, number=number)
            header, body = await get(store, number=number)
            assert body == BODY
            codecs.append(bool(header.codec))
    assert codecs[-60:].count(packed) == 59  # one is measured the other way


async def test_auto_begins_with_a_forecast_from_what_it_stores(folder):
    timed = TimedStore(folder().inner, 1e6, 1e6)
    with ThreadPoolExecutor(2) as threads:
        store = EnvelopeStore(timed, threads, Coding("auto", clock=timed.clock))
        for number in range(1, 5):
            await put(store, number=number)
        headers = [(await get(store, number=number))[0] for number in range(1, 5)]
    assert [bool(header.codec) for header in headers] == [False, True, True, True]
