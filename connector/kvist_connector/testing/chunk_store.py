"""Conformance suite of the `ChunkStore` contract.

A backend's tests subclass it and give a fixture `store` (an open, empty store that can hold
at least 1 MiB); pytest with asyncio_mode=auto runs the rest. `reopen` is overridden by
backends whose objects outlive the process.
"""

from __future__ import annotations

import asyncio

from kvist_connector.tiers.base import ChunkStore, Read

_KEY = bytes(range(16))
_OTHER = bytes(range(1, 17))


def key(number: int) -> bytes:
    """A key for every number."""
    return number.to_bytes(16, "big")


async def read_all(store: ChunkStore, name: bytes, size: int) -> tuple[int | None, bytes]:
    """Length as stored, and the first `size` bytes."""
    buffer = bytearray(size)
    length = await store.get(Read(name, [memoryview(buffer)]))
    return length, bytes(buffer)


class ChunkStoreSuite:
    """See module."""

    async def test_a_miss_is_none(self, store: ChunkStore) -> None:
        """Nothing stored, nothing found, nothing deleted."""
        assert await read_all(store, _KEY, 4) == (None, bytes(4))
        assert await store.delete(_KEY) is False

    async def test_what_was_put_is_read_across_any_split(self, store: ChunkStore) -> None:
        """Parts on writing and buffers on reading need not agree."""
        data = bytes(range(256)) * 64
        assert await store.put_if_absent(_KEY, [data[:10], memoryview(data)[10:5000], data[5000:]])
        for split in (1, 4096, len(data) - 1):
            buffers = [bytearray(split), bytearray(len(data) - split)]
            length = await store.get(Read(_KEY, [memoryview(buffer) for buffer in buffers]))
            assert length == len(data)
            assert b"".join(buffers) == data

    async def test_what_is_told_of_a_read_is_all_of_it_in_order(self, store: ChunkStore) -> None:
        """Who takes a checksum while pieces come may rely on it, or hears nothing."""
        data = bytes(range(255)) * 3000
        assert await store.put_if_absent(_KEY, [data])
        buffers = [bytearray(4096), bytearray(len(data))]
        told: list[bytes] = []
        read = Read(_KEY, [memoryview(part) for part in buffers], lambda piece: told.append(bytes(piece)))
        assert await store.get(read) == len(data)
        assert b"".join(told) in (b"", data)

    async def test_the_first_put_wins(self, store: ChunkStore) -> None:
        """An object never changes."""
        assert await store.put_if_absent(_KEY, [b"first"])
        assert not await store.put_if_absent(_KEY, [b"second!"])
        assert await read_all(store, _KEY, 5) == (5, b"first")

    async def test_lengths_are_told_when_buffers_differ(self, store: ChunkStore) -> None:
        """The caller compares; a short read is not an error of the store."""
        await store.put_if_absent(_KEY, [b"12345"])
        assert await read_all(store, _KEY, 2) == (5, b"12")
        length, data = await read_all(store, _KEY, 8)
        assert (length, data[:5]) == (5, b"12345")

    async def test_keys_do_not_mix(self, store: ChunkStore) -> None:
        """Deleting one leaves the other."""
        await store.put_if_absent(_KEY, [b"a"])
        await store.put_if_absent(_OTHER, [b"bb"])
        assert await store.delete(_KEY) is True
        assert (await read_all(store, _KEY, 1))[0] is None
        assert await read_all(store, _OTHER, 2) == (2, b"bb")

    async def test_a_deleted_key_can_be_put_again(self, store: ChunkStore) -> None:
        """Deletion is complete."""
        await store.put_if_absent(_KEY, [b"old"])
        await store.delete(_KEY)
        assert await store.put_if_absent(_KEY, [b"new"])
        assert await read_all(store, _KEY, 3) == (3, b"new")

    async def test_a_replacement_takes_the_place_of_what_was_seen(self, store: ChunkStore) -> None:
        """And of nothing else: neither of another object nor of none."""
        assert not await store.replace(_KEY, b"head", [b"new"])
        await store.put_if_absent(_KEY, [b"head and body"])
        assert not await store.replace(_KEY, b"body", [b"new"])
        assert await read_all(store, _KEY, 13) == (13, b"head and body")
        assert await store.replace(_KEY, b"head", [b"new", b"", b"er"])
        assert await read_all(store, _KEY, 5) == (5, b"newer")
        assert not await store.replace(_KEY, b"head", [b"old again"])
        assert await read_all(store, _KEY, 5) == (5, b"newer")

    async def test_of_replacements_at_once_one_is_made(self, store: ChunkStore) -> None:
        """Whoever was late hears of it, and looks again at what is there."""
        if not store.capabilities.shared:
            return
        bodies = [bytes([number]) * 10_000 for number in range(8)]
        for number in range(8):
            await store.put_if_absent(key(number), [b"head"])
            works = [store.replace(key(number), b"head", [body]) for body in bodies]
            made = await asyncio.gather(*works)
            assert sum(made) == 1
            assert await read_all(store, key(number), 10_000) == (10_000, bodies[made.index(True)])

    async def test_batches_keep_their_order(self, store: ChunkStore) -> None:
        """Results stand where their reads stood, misses included."""
        for number in range(0, 8, 2):
            await store.put_if_absent(key(number), [bytes([number]) * (number + 1)])
        reads = [Read(key(number), [memoryview(bytearray(16))]) for number in range(8)]
        results = await store.get_many(reads)
        assert results == [number + 1 if number % 2 == 0 else None for number in range(8)]

    async def test_items_and_capacity_agree(self, store: ChunkStore) -> None:
        """Where a store can list, the list is complete."""
        await store.put_if_absent(_KEY, [b"x" * 1000])
        await store.put_if_absent(_OTHER, [b"y" * 500])
        if store.capabilities.listable:
            found = {item.key: item.size async for item in store.items()}
            assert found == {_KEY: 1000, _OTHER: 500}
        assert (await store.capacity()).used >= 1500

    async def test_items_of_a_scope_are_those_of_its_keys(self, store: ChunkStore) -> None:
        """Scopes do not mix, and the chunk's own key may be the same in both."""
        if not store.capabilities.shared:
            return
        one, other = b"\xff" * 15 + b"*", b"\xff" * 15 + b"?"
        await store.put_if_absent(one + _KEY, [b"a"])
        await store.put_if_absent(other + _KEY, [b"bb"])
        await store.put_if_absent(other + _OTHER, [b"ccc"])
        assert {item.key async for item in store.items(one)} == {one + _KEY}
        assert {item.key: item.size async for item in store.items(other)} == {
            other + _KEY: 2,
            other + _OTHER: 3,
        }
        assert await read_all(store, other + _KEY, 2) == (2, b"bb")

    async def test_sizes_are_told_without_reading(self, store: ChunkStore) -> None:
        """In the order of the keys, misses included."""
        await store.put_if_absent(key(1), [b"x" * 1000])
        await store.put_if_absent(key(3), [b"y" * 500])
        assert await store.sizes([key(1), key(2), key(3)]) == [1000, None, 500]
        assert await store.sizes([]) == []

    async def test_objects_of_many_pieces_are_whole(self, store: ChunkStore) -> None:
        """No piece is lost, repeated or swapped, wherever buffers and parts are cut."""
        data = b"".join(number.to_bytes(4, "big") for number in range(200_000))
        await store.put_if_absent(_KEY, [data[:4096], data[4096:300_001], data[300_001:]])
        first, rest = bytearray(123_457), bytearray(len(data) - 123_457)
        length = await store.get(Read(_KEY, [memoryview(first), memoryview(rest)]))
        assert length == len(data)
        assert bytes(first + rest) == data

    async def test_concurrent_puts_of_a_key_store_one(self, store: ChunkStore) -> None:
        """Exactly one writer wins, and the object is one of theirs, whole."""
        contents = [bytes([number]) * 20_000 for number in range(8)]
        results = await asyncio.gather(*(store.put_if_absent(_KEY, [data]) for data in contents))
        assert sum(results) == 1
        length, data = await read_all(store, _KEY, 20_000)
        assert length == 20_000
        assert data in contents

    async def test_empty_parts_are_fine(self, store: ChunkStore) -> None:
        """A rank without bytes does not exist, but zero lengths do no harm."""
        await store.put_if_absent(_KEY, [b"", b"abc", b""])
        assert await read_all(store, _KEY, 3) == (3, b"abc")
