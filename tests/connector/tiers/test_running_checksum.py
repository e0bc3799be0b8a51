"""A checksum taken while pieces come is that of the body, or none."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.tiers.header import HEADER_BYTES, checksum
from kvist_connector.tiers.running import RunningChecksum


@given(body=st.binary(max_size=2000), cuts=st.lists(st.integers(0, HEADER_BYTES + 2000), max_size=6))
def test_however_the_object_is_cut(body, cuts):
    whole = memoryview(bytes(HEADER_BYTES) + body)
    running = RunningChecksum()
    edges = sorted({0, *(min(cut, whole.nbytes) for cut in cuts), whole.nbytes})
    for start, end in itertools.pairwise(edges):
        running(whole[start:end])
    assert running.of(len(body)) == checksum([body])


@given(size=st.integers(0, 100), claimed=st.integers(0, 100))
def test_of_another_length_there_is_none(size, claimed):
    running = RunningChecksum()
    running(memoryview(bytes(HEADER_BYTES + size)))
    assert (running.of(claimed) is None) == (claimed != size)


def test_nothing_seen_is_nothing_known():
    assert RunningChecksum().of(0) is None
