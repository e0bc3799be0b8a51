"""The arena's bytes: nothing overlaps, everything is inside, a half-written header is never usable."""

import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.arena import geometry as arena
from kvist_connector.arena.headers import NO_KEY, Headers, State
from kvist_connector.arena.locks import MemberLock, living_members, member_alive
from kvist_connector.errors import UnsupportedError
from kvist_connector.protocol.engine import Geometry

GEOMETRIES = st.builds(
    Geometry,
    slots=st.integers(1, 40),
    ranks=st.integers(1, 4),
    layers=st.integers(1, 5),
    layer_bytes=st.integers(1, 9000),
    blocks=st.just(1),
    chunk_tokens=st.integers(1, 256),
)


@given(geometry=GEOMETRIES)
def test_slots_lie_apart_and_inside(geometry):
    size = arena.slot_bytes(geometry)
    spans = [
        (arena.slot_offset(geometry, rank, slot), arena.slot_offset(geometry, rank, slot) + size)
        for rank in range(geometry.ranks)
        for slot in range(geometry.slots)
    ]
    headers_end = arena.header_offset(geometry.slots)
    assert headers_end <= spans[0][0]
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= arena.file_bytes(geometry)
    assert all(arena.region_offset(geometry, rank) % arena.PAGE == 0 for rank in range(geometry.ranks))


@given(geometry=GEOMETRIES, wanted=st.integers(1, 50), spare=st.integers(0, 1 << 20))
def test_as_many_slots_as_fit(geometry, wanted, spare):
    per_rank = arena.slot_bytes(geometry)
    padding = (2 + geometry.ranks) * arena.PAGE
    size = padding + wanted * (arena.HEADER_BYTES + geometry.ranks * per_rank) + spare
    slots = arena.slots_that_fit(size, geometry.ranks, per_rank)
    assert slots >= wanted
    fitted = Geometry(
        slots=slots, ranks=geometry.ranks, layers=1, layer_bytes=per_rank, blocks=1, chunk_tokens=1
    )
    assert arena.file_bytes(fitted) <= size


@given(geometry=GEOMETRIES, fingerprint=st.binary(max_size=64), epoch=st.integers(0, 2**63))
def test_superblock_round_trip(geometry, fingerprint, epoch):
    packed = arena.pack_superblock(geometry, fingerprint, epoch)
    assert arena.unpack_superblock(packed.ljust(4096, b"\0")) == (geometry, fingerprint, epoch)
    with pytest.raises(UnsupportedError, match="not a Kvist arena"):
        arena.unpack_superblock(b"X" + packed[1:])
    with pytest.raises(UnsupportedError, match="format"):
        arena.unpack_superblock(packed[:8] + b"\x09" + packed[9:])


@given(slot=st.integers(0, 3), generation=st.integers(0, 2**63), key=st.binary(min_size=16, max_size=16))
def test_headers_round_trip_and_neighbours_stay(slot, generation, key):
    mapping = bytearray(arena.PAGE * 2)
    headers = Headers(mapping, 4)
    headers.write(slot, generation, State.COMMITTED, key, 3)
    found = headers.read(slot)
    assert (found.generation, found.state, found.key, found.index) == (generation, State.COMMITTED, key, 3)
    for other in {0, 1, 2, 3} - {slot}:
        assert headers.read(other).state == State.FREE
        assert headers.read(other).key == NO_KEY


def test_a_header_is_never_usable_while_it_changes(monkeypatch):
    mapping = bytearray(arena.PAGE * 2)
    headers = Headers(mapping, 1)
    headers.write(0, 5, State.RESERVED)
    seen = []
    from kvist_connector.arena import headers as module

    class Spy:
        def pack_into(self, buffer, offset, value):
            if State(int.from_bytes(mapping[arena.PAGE + 8 : arena.PAGE + 12], "little")) != State.QUARANTINE:
                seen.append("generation changed under a usable state")
            buffer[offset : offset + 8] = value.to_bytes(8, "little")

        def unpack_from(self, buffer, offset):
            return (int.from_bytes(buffer[offset : offset + 8], "little"),)

    monkeypatch.setattr(module, "_GENERATION", Spy())
    headers.write(0, 6, State.COMMITTED, b"k" * 16)
    assert not seen
    assert headers.holds(0, 6, State.COMMITTED)
    assert not headers.holds(0, 5, State.COMMITTED)


def test_an_unknown_state_is_not_usable():
    mapping = bytearray(arena.PAGE * 2)
    mapping[arena.PAGE + 8] = 77
    assert Headers(mapping, 1).read(0).state == State.QUARANTINE
    with pytest.raises(IndexError):
        Headers(mapping, 1).read(1)


def test_a_member_lives_as_long_as_it_holds_its_lock(tmp_path):
    path = tmp_path / "arena"
    assert living_members(path) == set()
    lock = MemberLock(path, "w0")
    assert living_members(path) == {"w0"}
    lock.close()
    lock.close()
    assert not member_alive(path, "w0")
    with pytest.raises(ValueError, match="file name"):
        MemberLock(path, "../x")


def test_a_lock_taken_while_the_agent_asks_is_never_missed(tmp_path):
    """The agent removes files of dead members; one that is just being born must not be among them."""
    path = tmp_path / "arena"
    done = threading.Event()

    def ask():
        while not done.is_set():
            living_members(path)

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        for number in range(300):
            lock = MemberLock(path, f"w{number}")
            assert member_alive(path, f"w{number}")
            lock.close()
    finally:
        done.set()
        for thread in asking:
            thread.join()


def test_a_killed_member_is_dead_at_once(tmp_path):
    path = tmp_path / "arena"
    program = (
        "import sys; from pathlib import Path; from kvist_connector.arena.locks import MemberLock\n"
        "lock = MemberLock(Path(sys.argv[1]), 'w1'); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        assert living_members(path) == {"w1"}
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=20)
    assert living_members(path) == set()
