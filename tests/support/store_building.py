"""Shared by the tests of the disk store. Bytes are derived from the hash, so that a wrong one is noticed."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvtier import BlockHash, Namespace
from kvtier.errors import TierFull
from kvtier.stores.disk import DiskStore, Written
from kvtier.stores.files import Files
from kvtier.stores.stored_block import StoreSpace

DATA_NAME = "blocks.kvtier"
RECORDS_NAME = "records.kvtier"
NAMESPACE = Namespace(bytes(range(32)))
OTHER_NAMESPACE = Namespace(bytes(range(32, 64)))
UNIT = 4096
MIB = 1 << 20


def hash_of(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(str(number).encode()).digest())


def payload(block_hash: BlockHash, nbytes: int) -> bytes:
    """No two units of it are equal, so that a swap shows."""
    return b"".join(
        hashlib.sha256(block_hash + bytes([part % 256])).digest() * 16 for part in range(-(-nbytes // 512))
    )[:nbytes]


@contextlib.contextmanager
def opened(folder: Path, file_space: int = 4 * MIB, files: Files | None = None) -> Iterator[DiskStore]:
    store = DiskStore(folder, file_space, files=files)
    try:
        yield store
    finally:
        store.close()


def space_of(store: DiskStore, block_bytes: int = UNIT, namespace: Namespace = NAMESPACE) -> StoreSpace:
    return store.open(namespace, "a model", block_bytes, 16)


def write(store: DiskStore, space: StoreSpace, numbers: Iterable[int]) -> list[Written]:
    """One after the other. Raises `TierFull` for one that finds no room."""
    outcomes = []
    for number in numbers:
        block_hash = hash_of(number)
        outcomes += store.write(space, [block_hash], [memoryview(payload(block_hash, space.block_bytes))])
        if outcomes[-1] is Written.NO_ROOM:
            raise TierFull(f"no room for block {number}")
    return outcomes


def read(store: DiskStore, space: StoreSpace, number: int) -> bytes | None:
    """The bytes of a block, None when it is absent or was found corrupt."""
    blocks = store.match(space, [hash_of(number)])
    if not blocks:
        return None
    into = bytearray(space.block_bytes)
    try:
        return bytes(into) if store.read(blocks, [memoryview(into)]) == [None] else None
    finally:
        store.free(blocks)


def read_rightly(store: DiskStore, space: StoreSpace, numbers: Iterable[int]) -> set[int]:
    """The `numbers` whose blocks are stored. Fails on a wrong byte."""
    there = set()
    for number in numbers:
        found = read(store, space, number)
        if found is not None:
            assert found == payload(hash_of(number), space.block_bytes), f"wrong bytes for block {number}"
            there.add(number)
    return there


def crashed(folder: Path, into: Path) -> Path:
    """The folder as a process that is killed now would leave it."""
    into.mkdir(parents=True)
    shutil.copy(folder / RECORDS_NAME, into / RECORDS_NAME)
    shutil.copy(folder / DATA_NAME, into / DATA_NAME)
    return into


def start_of(store: DiskStore, space: StoreSpace, number: int) -> int:
    """Where a block's payload lies in the file."""
    blocks = store.match(space, [hash_of(number)])
    start = blocks[0].start * UNIT
    store.free(blocks)
    return start


def stored_among(store: DiskStore, space: StoreSpace, numbers: range) -> set[int]:
    flags = store.contains(space, [hash_of(number) for number in numbers])
    return {number for number, is_there in zip(numbers, flags, strict=True) if is_there}


def use(store: DiskStore, space: StoreSpace, number: int) -> bool:
    blocks = store.match(space, [hash_of(number)])
    store.free(blocks)
    return bool(blocks)


def size_of(folder: Path) -> int:
    return sum(max(path.stat().st_size, path.stat().st_blocks * 512) for path in folder.iterdir())
