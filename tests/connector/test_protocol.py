"""Frames: any split of the byte stream gives the same messages; broken peers are refused early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.protocol import engine as wire
from kvist_connector.protocol import feed
from kvist_connector.protocol.framing import MAX_FRAME_BYTES, FrameDecoder, FrameError, body_length, encode

MESSAGES = st.one_of(
    st.builds(wire.Quiesced, ticket=st.integers(0, 2**40)),
    st.builds(
        wire.Lookup, request=st.text(max_size=5), keys=st.binary(max_size=64), tokens=st.integers(0, 9)
    ),
    st.builds(
        wire.Step,
        discards=st.lists(st.builds(wire.SlotRef, st.integers(0, 9), st.integers(0, 2**62))).map(tuple),
        bad_keys=st.binary(max_size=32),
        load=st.none() | st.builds(wire.EngineLoad, last_accepted=st.dictionaries(st.text(), st.text())),
    ),
    st.just(wire.Reset()),
)


@given(messages=st.lists(MESSAGES, max_size=6), cuts=st.lists(st.integers(1, 40), max_size=30))
def test_any_split_gives_the_same_messages(messages, cuts):
    stream = b"".join(encode(message) for message in messages)
    decoder = FrameDecoder(wire.ToAgent)
    received = []
    for cut in cuts:
        received += decoder.feed(stream[:cut])
        stream = stream[cut:]
    received += decoder.feed(stream)
    assert received == messages


@given(garbage=st.binary(min_size=1, max_size=50))
def test_garbage_is_refused_or_waited_for_but_never_a_message(garbage):
    try:
        decoded = list(FrameDecoder(wire.ToEngine).feed(len(garbage).to_bytes(4, "little") + garbage))
    except FrameError:
        return
    assert all(isinstance(message, wire.Message) for message in decoded)


def test_a_length_above_the_limit_is_refused_before_its_bytes():
    header = (MAX_FRAME_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(FrameError, match="above the limit"):
        body_length(header)
    with pytest.raises(FrameError, match="above the limit"):
        list(FrameDecoder(wire.ToAgent).feed(header))


def test_a_message_of_the_other_direction_is_refused():
    frame = encode(wire.Evicted(keys=b""))
    with pytest.raises(FrameError, match="protocol"):
        list(FrameDecoder(wire.ToAgent).feed(frame))


def test_messages_before_a_broken_frame_are_delivered_once():
    decoder = FrameDecoder(wire.ToAgent)
    stream = decoder.feed(encode(wire.Reset()) + encode(wire.Evicted(keys=b"")))
    assert next(stream) == wire.Reset()
    with pytest.raises(FrameError):
        next(stream)


def test_wire_names_are_pinned():
    """A renamed class is another protocol: PROTOCOL_VERSION or FEED_VERSION must change with it."""
    assert encode(wire.Quiesced(ticket=7)) == b"\x0b\0\0\0\x92\xa8Quiesced\x07"
    assert (
        encode(feed.State(sequence=1, gpu_known=True, draining=False))
        == b"\x0a\0\0\0\x94\xa5State\x01\xc3\xc2"
    )
    assert (wire.PROTOCOL_VERSION, feed.FEED_VERSION) == (1, 1)
