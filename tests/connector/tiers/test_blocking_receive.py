"""A receive in a thread: all bytes, the end of a connection, and a caller that gives up."""

import asyncio
import socket

import pytest

from kvist_connector.tiers.blocking_receive import receive_all

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
        await asyncio.get_running_loop().sock_sendall(theirs, b"x" * 1000)
        while into[999] != ord("x"):
            await asyncio.sleep(0)  # the thread has not begun
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
    with pytest.raises(BrokenPipeError):
        theirs.send(b"more")
    assert into.count(b"x") == 1000


async def test_a_failure_is_the_callers(pair):
    ours, _ = pair
    ours.close()
    with pytest.raises(OSError):
        await receive_all(ours, memoryview(bytearray(SIZE)))
