"""Keys: golden vectors pin every byte, properties say what must never collide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.keys import (
    chunk_keys,
    extend_keys,
    next_key,
    pack_tokens,
    root_key,
    split_keys,
    tail_keys,
)

FINGERPRINT = bytes(range(32))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_golden_vectors():
    root = root_key(FINGERPRINT)
    assert root.hex() == "67e1ac9ada5aaaaba2a93c96268ea635"
    other = root_key(FINGERPRINT, group=1, lora="a", lora_revision="b", salt="c")
    assert other.hex() == "e4f4a976b06e4d08051fcc738ee8e90a"
    assert [key.hex() for key in chunk_keys(root, list(range(600)))] == [
        "595b50af8b0e2e01d9cb1d9b3d301fb8",
        "ee7a3b19fe323adf570eea0d735638bc",
    ]
    assert next_key(root, pack_tokens([1, 2, 3]), [b"img"]).hex() == "fe2a5a5cc8848c692347ab767b27b955"
    assert [key.hex() for key in tail_keys(root, list(range(70)), 32)] == [
        "ad0e845e4ca5558348a19e906b3f5e8b",
        "b7491f7b24280205364d42eee3e8283b",
    ]


def test_tokens_are_little_endian_and_bounded():
    assert pack_tokens([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    with pytest.raises(OverflowError):
        pack_tokens([-1])
    with pytest.raises(OverflowError):
        pack_tokens([2**32])


@given(tokens=TOKENS, cut=st.integers(0, 40))
def test_a_chain_depends_only_on_its_prefix(tokens, cut):
    root = root_key(FINGERPRINT)
    whole = chunk_keys(root, tokens, 4)
    assert len(whole) == len(tokens) // 4
    part = chunk_keys(root, tokens[:cut], 4)
    assert whole[: len(part)] == part
    assert extend_keys(root, part, tokens, 4) == whole


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=40), data=st.data())
def test_any_change_changes_every_later_key(tokens, data):
    root = root_key(FINGERPRINT)
    place = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = list(tokens)
    changed[place] ^= data.draw(st.integers(1, 2**32 - 1))
    before, after = chunk_keys(root, tokens, 4), chunk_keys(root, changed, 4)
    assert before[: place // 4] == after[: place // 4]
    assert not set(before[place // 4 :]) & set(after)


FIELDS = st.tuples(st.binary(max_size=4), st.integers(0, 3), *(st.text(max_size=3) for _ in range(3)))


@given(one=FIELDS, other=FIELDS)
def test_no_two_inputs_share_a_root(one, other):
    def root(fields):
        return root_key(fields[0], group=fields[1], lora=fields[2], lora_revision=fields[3], salt=fields[4])

    assert (root(one) == root(other)) == (one == other)


@given(
    tokens=st.lists(st.integers(0, 1000), min_size=8, max_size=8),
    images=st.lists(st.binary(max_size=3), max_size=3),
)
def test_multimodal_items_are_part_of_the_key(tokens, images):
    plain = next_key(bytes(16), pack_tokens(tokens))
    assert (next_key(bytes(16), pack_tokens(tokens), images) == plain) == (not images)
    assert next_key(bytes(16), pack_tokens(tokens), [b"".join(images), b""]) != next_key(
        bytes(16), pack_tokens(tokens), [b"", b"".join(images), b"x"]
    )


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_tails_lead_to_the_chunk(tokens):
    root = root_key(FINGERPRINT)
    tails = tail_keys(root, tokens, 4, 16)
    assert len(tails) == min(len(tokens), 16) // 4
    if len(tokens) >= 16:
        assert tails[-1] == chunk_keys(root, tokens, 16)[0]


@given(keys=st.lists(st.binary(min_size=16, max_size=16), max_size=5))
def test_joined_keys_split_again(keys):
    assert split_keys(b"".join(keys)) == keys
    with pytest.raises(ValueError, match="multiple"):
        split_keys(b"".join(keys) + b"x")
