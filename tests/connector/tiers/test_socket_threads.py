"""Bytes through sockets in threads: all of them, the end of a connection, and a caller that gives up."""

import asyncio
import socket

import pytest

from kvist_connector.tiers.socket_threads import receive_all, send_file

SIZE = 3 << 20
DEADLINE = 20.0


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


async def test_returns_with_every_byte_and_the_loop_goes_on_meanwhile(pair):
    ours, theirs = pair
    into, data = bytearray(SIZE), bytes(range(256)) * (SIZE // 256)
    async with asyncio.timeout(DEADLINE):
        receiving = asyncio.create_task(receive_all(ours, memoryview(into)))
        for start in range(0, SIZE, SIZE // 3):
            await asyncio.get_running_loop().sock_sendall(theirs, data[start : start + SIZE // 3])
        assert await receiving == SIZE
    assert into == data
    assert ours.gettimeout() == 0.0, "the loop can use the socket again"


async def test_says_how_much_came_before_the_end(pair):
    ours, theirs = pair
    async with asyncio.timeout(DEADLINE):
        receiving = asyncio.create_task(receive_all(ours, memoryview(bytearray(SIZE))))
        await asyncio.get_running_loop().sock_sendall(theirs, b"x" * 1000)
        theirs.close()
        assert await receiving == 1000
        assert await receive_all(ours, memoryview(bytearray(SIZE))) == 0


async def test_whoever_gives_up_has_the_buffer_back(pair):
    ours, theirs = pair
    into = bytearray(SIZE)
    async with asyncio.timeout(DEADLINE):
        receiving = asyncio.create_task(receive_all(ours, memoryview(into)))
        # More than the kernel keeps: some of it has been received when this returns.
        await asyncio.get_running_loop().sock_sendall(theirs, b"x" * (SIZE // 2))
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
    with pytest.raises(BrokenPipeError):
        theirs.send(b"more")
    assert 0 < into.count(b"x") <= SIZE // 2


async def test_a_failure_is_the_callers(pair):
    ours, _ = pair
    ours.close()
    with pytest.raises(OSError):
        await receive_all(ours, memoryview(bytearray(SIZE)))


async def test_a_file_arrives_from_where_it_was_asked_for(pair, tmp_path):
    ours, theirs = pair
    data = bytes(range(256)) * (SIZE // 256)
    (tmp_path / "file").write_bytes(data)
    into = bytearray(SIZE - 1000)
    with (tmp_path / "file").open("rb") as file:
        async with asyncio.timeout(DEADLINE):
            sending = asyncio.create_task(send_file(theirs, file.fileno(), 1000, SIZE))
            assert await receive_all(ours, memoryview(into)) == SIZE - 1000
            assert await sending == SIZE - 1000, "the file ends before"
    assert into == data[1000:]


async def test_who_stops_sending_ends_the_connection(pair, tmp_path):
    ours, theirs = pair
    (tmp_path / "file").write_bytes(bytes(SIZE))
    with (tmp_path / "file").open("rb") as file:
        async with asyncio.timeout(DEADLINE):
            sending = asyncio.create_task(send_file(theirs, file.fileno(), 0, SIZE))
            assert await asyncio.get_running_loop().sock_recv(ours, 1)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert await receive_all(ours, memoryview(bytearray(SIZE))) < SIZE - 1


async def test_a_reader_that_left_is_a_failure(pair, tmp_path):
    ours, theirs = pair
    (tmp_path / "file").write_bytes(bytes(SIZE))
    ours.close()
    with (tmp_path / "file").open("rb") as file, pytest.raises(ConnectionError):
        await send_file(theirs, file.fileno(), 0, SIZE)
