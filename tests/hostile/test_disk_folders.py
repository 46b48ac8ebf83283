"""Damaged or crafted folders of a disk store: never a wrong byte, and the store opens and works."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierFull, TierRefused
from kvtier.stores.cipher import BlockCipher, SealingFiles
from kvtier.stores.disk import DiskStore
from kvtier.stores.records import (
    HEADER_BYTES,
    RECORD_BYTES,
    BlockRecord,
    Header,
    decode_records,
    encode_block,
    encode_header,
)
from tests.support.fuzzing import SOAK_TIMES, seeds, spoiled_bytes, told
from tests.support.store_building import (
    DATA_NAME,
    MIB,
    OTHER_NAMESPACE,
    RECORDS_NAME,
    UNIT,
    opened,
    read_rightly,
    space_of,
    write,
)

pytest.importorskip("cryptography")
_KEY = bytes(range(32))
_NUM_CASES = 600
_NUMBERS = range(60)
_LARGE_NUMBERS = range(1000, 1020)
_EDGES = (
    0,
    1,
    2,
    15,
    16,
    100,
    4095,
    4096,
    4097,
    1 << 20,
    1 << 31,
    1 << 32,
    1 << 40,
    1 << 51,
    1 << 62,
    2**63,
    2**64 - 1,
)


def _sealing(key: bytes) -> SealingFiles:
    return SealingFiles(BlockCipher(key))


def _crafted(rng: random.Random, record: BlockRecord, others: list[BlockRecord]) -> BlockRecord:
    """A record whose own checksum is right, and which says something else than it did."""
    other = rng.choice(others)
    match rng.randrange(10):
        case 0:
            return record._replace(sequence=rng.choice(_EDGES))
        case 1:
            return record._replace(used_at=rng.choice(_EDGES))
        case 2:
            return record._replace(start=rng.choice((*_EDGES, other.start, other.start + 1)))
        case 3:
            return record._replace(block_bytes=rng.choice((*_EDGES, other.block_bytes)))
        case 4:
            return record._replace(block_tokens=rng.choice(_EDGES[:11]))
        case 5:
            return record._replace(namespace=other.namespace, hash=other.hash)
        case 6:
            return record._replace(name=rng.choice(("\x1b[2J", "é" * 48, "\0a")), is_pinned=True)
        case 7:
            return record._replace(checksum=rng.choice((0, 2**64 - 1, other.checksum)))
        case 8:
            return record._replace(seal=rng.choice((b"", rng.randbytes(36), other.seal)))
    return other._replace(start=record.start)


def _craft(rng: random.Random, folder: Path) -> None:
    path = folder / RECORDS_NAME
    if path.stat().st_size > 64 * MIB:
        return
    raw = bytearray(path.read_bytes())
    num_records = max(0, len(raw) - HEADER_BYTES) // RECORD_BYTES
    del raw[HEADER_BYTES + num_records * RECORD_BYTES :]
    records = list(decode_records(memoryview(raw)[HEADER_BYTES:]))
    there = [record for record in records if isinstance(record, BlockRecord)]
    if not there:
        return
    for _ in range(rng.randrange(1, 30)):
        number = rng.randrange(len(records))
        record = records[number]
        base = record if isinstance(record, BlockRecord) else rng.choice(there)
        start = HEADER_BYTES + number * RECORD_BYTES
        raw[start : start + RECORD_BYTES] = encode_block(_crafted(rng, base, there), number)
    if rng.random() < 0.3:
        raw[:HEADER_BYTES] = encode_header(Header(rng.choice((0, 1, 1, 2)), rng.choice(_EDGES)))
    path.write_bytes(raw)


def _damage(rng: random.Random, folder: Path) -> None:
    path = folder / rng.choice((DATA_NAME, RECORDS_NAME))
    if path.stat().st_size > 64 * MIB:
        return
    match rng.randrange(5):
        case 0:
            path.write_bytes(spoiled_bytes(rng, path.read_bytes()))
        case 1:
            os.truncate(path, rng.choice((0, 1, 4096, rng.randrange(8 * MIB), 1 << 34)))
        case 2:
            raw = bytearray(path.read_bytes())
            place = rng.randrange(len(raw) + 1)
            raw[place : place + 4096] = rng.randbytes(4096)
            path.write_bytes(raw)
        case 3:
            path.unlink()
            if rng.random() < 0.3:
                path.mkdir()
        case _:
            _craft(rng, folder)


def _use(store: DiskStore) -> None:
    with contextlib.suppress(TierRefused):  # a record says that this namespace has blocks of another size
        read_rightly(store, space_of(store, 4 * UNIT, OTHER_NAMESPACE), _LARGE_NUMBERS)
    space = space_of(store)
    read_rightly(store, space, _NUMBERS)
    for one in store.spaces():
        for block_hash, _ in store.blocks(one):
            store.verify(one, block_hash)
    try:
        write(store, space, range(2000, 2010))
    except TierFull:
        return  # records say that all of it is pinned
    assert read_rightly(store, space, range(2000, 2010)) == set(range(2000, 2010))
    store.flush(fsync=False)


def _try(bases: dict[str, Path], folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bases[rng.choice(("plain", "plain", "sealed"))], folder)
    files = _sealing(rng.choice((_KEY, _KEY, bytes(32)))) if rng.random() < 0.4 else None
    for _ in range(rng.randrange(1, 4)):
        if (folder / RECORDS_NAME).is_file() and (folder / DATA_NAME).is_file():
            rng.choice((_craft, _damage))(rng, folder)
    space_bytes = rng.choice((4 * MIB, MIB // 2, 64 * MIB))
    with told(seed, space_bytes):
        for _ in range(2):
            with contextlib.suppress(ConfigError), opened(folder, space_bytes, files) as store:
                with contextlib.suppress(TierRefused):
                    _use(store)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two stores with the same blocks, of which one is ciphertext."""
    folder = tmp_path_factory.mktemp("bases")
    for name, files in (("plain", None), ("sealed", _sealing(_KEY))):
        with opened(folder / name, files=files) as store:
            write(store, space_of(store), _NUMBERS)
            write(store, space_of(store, 4 * UNIT, OTHER_NAMESPACE), _LARGE_NUMBERS)
    return {name: folder / name for name in ("plain", "sealed")}


@pytest.mark.scaled
def test_any_folder_opens_and_gives_no_wrong_byte(bases: dict[str, Path], tmp_path: Path) -> None:
    for seed in seeds(_NUM_CASES):
        _try(bases, tmp_path / "store", seed)


@pytest.mark.soak
def test_any_of_many_folders_opens_and_gives_no_wrong_byte(bases: dict[str, Path], tmp_path: Path) -> None:
    for seed in range(_NUM_CASES, SOAK_TIMES * _NUM_CASES):
        _try(bases, tmp_path / "store", seed)
