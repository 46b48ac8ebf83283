"""Blocks as ciphertext: nothing else on disk, never a nonce twice, and blocks of the other kind are counted misses."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierRefused
from kvtier.stores.cipher import SEAL_BYTES, BlockCipher, SealingFiles, read_key, sealing_files
from kvtier.stores.files import NotAuthentic
from kvtier.stores.records import HEADER_BYTES, BlockRecord, decode_header, decode_records, encode_header
from tests.support.store_building import (
    DATA_NAME,
    MIB,
    RECORDS_NAME,
    UNIT,
    crashed,
    hash_of,
    opened,
    payload,
    read,
    read_rightly,
    space_of,
    start_of,
    write,
)

pytest.importorskip("cryptography")
_KEY = bytes(range(32))
_SIZES = [1, 100, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT - 10, 40 * UNIT]


def _forget_key(folder: Path) -> None:
    """Write the header as a kvtier does that knows nothing of keys in it."""
    with (folder / RECORDS_NAME).open("r+b") as file:
        header = decode_header(file.read(HEADER_BYTES))
        assert header is not None
        file.seek(0)
        file.write(encode_header(header._replace(key_check=b"")))


def _sealing(key: bytes = _KEY) -> SealingFiles:
    return SealingFiles(BlockCipher(key))


def _records(folder: Path) -> list[BlockRecord]:
    raw = (folder / RECORDS_NAME).read_bytes()[HEADER_BYTES:]
    return [record for record in decode_records(memoryview(raw)) if isinstance(record, BlockRecord)]


@pytest.mark.parametrize("block_bytes", _SIZES)
def test_blocks_of_any_size_come_back_also_after_opening_again(tmp_path: Path, block_bytes: int) -> None:
    with opened(tmp_path, files=_sealing()) as store:
        write(store, space_of(store, block_bytes), range(10))
        assert read_rightly(store, space_of(store, block_bytes), range(10)) == set(range(10))
    with opened(tmp_path, files=_sealing()) as store:
        assert read_rightly(store, space_of(store, block_bytes), range(10)) == set(range(10))
        assert store.losses == {}


def test_nothing_but_ciphertext_is_on_the_disk(tmp_path: Path) -> None:
    with opened(tmp_path, files=_sealing()) as store:
        write(store, space_of(store), range(10))
    everything = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    with opened(tmp_path / "plain") as store:
        write(store, space_of(store), range(10))
    plain = {record.hash: record for record in _records(tmp_path / "plain")}
    for number in range(10):
        raw = payload(hash_of(number), UNIT)
        assert not any(raw[start : start + 32] in everything for start in range(0, UNIT, 32))
    for record in _records(tmp_path):
        assert record.checksum != plain[record.hash].checksum, "a checksum would tell what the bytes are"
        assert len(record.seal) == SEAL_BYTES


def test_equal_blocks_are_different_ciphertexts_and_no_nonce_is_used_twice(tmp_path: Path) -> None:
    nonces = set()
    for turn in range(3):
        with opened(tmp_path, files=_sealing()) as store:
            space = space_of(store)
            for number in range(20):
                store.drop(space, [hash_of(number)])
                write(store, space, [number])
        crashed(tmp_path, tmp_path / f"crash-{turn}")
        nonces |= {record.seal[:20] for record in _records(tmp_path)}
    assert len(nonces) == 60


def test_threads_never_use_a_nonce_twice() -> None:
    cipher = BlockCipher(_KEY)
    seals: list[bytes] = []

    def work() -> None:
        with cipher.staged(UNIT) as staging:
            seals.extend(cipher.seal(b"", memoryview(bytes(8)), staging, UNIT)[:20] for _ in range(500))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seals)) == 2000


def test_a_flipped_bit_a_moved_block_and_another_key_are_not_authentic(tmp_path: Path) -> None:
    with opened(tmp_path, files=_sealing()) as store:
        space = space_of(store)
        write(store, space, range(4))
        places = [start_of(store, space, number) for number in range(4)]
    with (tmp_path / DATA_NAME).open("r+b") as file:
        raw = file.read()
        file.seek(places[0])
        file.write(bytes([raw[places[0]] ^ 1]))
        file.seek(places[1])
        file.write(raw[places[2] : places[2] + UNIT])
    with opened(tmp_path, files=_sealing()) as store:
        assert read_rightly(store, space_of(store), range(4)) == {2, 3}
        assert store.losses == {"not authentic": 2}
    _forget_key(tmp_path)  # as a kvtier of before would leave it: another key shows when a block is read
    with opened(tmp_path, files=_sealing(bytes(32))) as store:
        assert read_rightly(store, space_of(store), range(4)) == set()
        assert store.losses == {"not authentic": 2}


def test_a_ciphertext_is_bound_to_what_it_is_about() -> None:
    cipher = BlockCipher(_KEY)
    into = bytearray(100)
    with cipher.staged(UNIT) as staging:
        seal = cipher.seal(b"one", memoryview(b"x" * 100), staging, UNIT)
        with pytest.raises(NotAuthentic):
            cipher.open(seal, b"other", staging, memoryview(into))
        cipher.open(seal, b"one", staging, memoryview(into))
    assert into == b"x" * 100


def test_blocks_of_before_there_was_a_key_are_misses_and_counted(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, space_of(store), range(10))
    with opened(tmp_path, files=_sealing()) as store:
        space = space_of(store)
        assert read_rightly(store, space, range(10)) == set()
        assert store.losses == {"not encrypted": 10}
        write(store, space, range(10))
    with opened(tmp_path, files=_sealing()) as store:
        assert read_rightly(store, space_of(store), range(10)) == set(range(10))
        assert store.losses == {}


def test_a_store_without_its_key_is_not_opened_and_loses_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, files=_sealing()) as store:
        write(store, space_of(store), range(10))
    for _ in range(2):  # the folder is free again after the first
        with pytest.raises(ConfigError, match=f"the blocks in {tmp_path} are encrypted: their server needs the key"):
            opened(tmp_path).__enter__()
    with opened(tmp_path, files=_sealing()) as store:
        assert read_rightly(store, space_of(store), range(10)) == set(range(10))
        assert store.losses == {}


def test_a_store_with_another_key_is_not_opened_and_loses_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, files=_sealing()) as store:
        write(store, space_of(store), range(10))
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"the blocks in {tmp_path} are encrypted with another key"):
            opened(tmp_path, files=_sealing(bytes(32))).__enter__()
    with opened(tmp_path, files=_sealing()) as store:
        assert read_rightly(store, space_of(store), range(10)) == set(range(10))
        assert store.losses == {}
        store.drop(space_of(store))
    with opened(tmp_path, files=_sealing(bytes(32))) as store:  # nothing is left that has the old key
        write(store, space_of(store), range(10))
    with pytest.raises(ConfigError, match="another key"):
        opened(tmp_path, files=_sealing()).__enter__()


def test_a_folder_of_before_its_header_told_the_key_is_opened(tmp_path: Path) -> None:
    """With the right key the header tells it from then on; with another one, it does not tell that."""
    with opened(tmp_path, files=_sealing()) as store:
        write(store, space_of(store), range(10))
    _forget_key(tmp_path)
    with opened(tmp_path, files=_sealing(bytes(32))):
        pass
    with opened(tmp_path, files=_sealing()) as store:
        assert read_rightly(store, space_of(store), range(10)) == set(range(10))
    with pytest.raises(ConfigError, match="another key"):
        opened(tmp_path, files=_sealing(bytes(32))).__enter__()


def test_a_header_tells_nothing_of_the_key_and_of_no_key_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "sealed", files=_sealing()) as store:
        write(store, space_of(store), range(2))
    assert _KEY not in (tmp_path / "sealed" / RECORDS_NAME).read_bytes()[:HEADER_BYTES]
    with opened(tmp_path / "plain") as store:
        write(store, space_of(store), range(2))
    header = decode_header((tmp_path / "plain" / RECORDS_NAME).read_bytes()[:HEADER_BYTES])
    assert header is not None
    assert header.key_check == b""


def test_a_smaller_budget_recency_and_pins_work_on_ciphertext(tmp_path: Path) -> None:
    with opened(tmp_path, 4 * MIB, files=_sealing()) as store:
        space = space_of(store)
        write(store, space, range(600))
        store.pin(space, [hash_of(0)])
        assert read(store, space, 1) is not None
    with opened(tmp_path, MIB, files=_sealing()) as store:
        there = read_rightly(store, space_of(store), range(600))
        assert {0, 1} <= there
        assert len(there) > 100
        assert set(store.losses) == {"over the budget"}


def test_slots_of_aligned_memory_are_sealed_too(tmp_path: Path) -> None:
    with opened(tmp_path, files=_sealing()) as store:
        space = space_of(store, 100)
        raw = payload(hash_of(1), 100)
        store.write(space, [hash_of(1)], [memoryview(bytearray(raw.ljust(UNIT, b"\7")))])
        assert read(store, space, 1) == raw
    assert b"\7" * 64 not in (tmp_path / DATA_NAME).read_bytes()


def test_a_block_too_large_to_seal_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, files=_sealing()) as store:
        with pytest.raises(TierRefused, match="a block of 2GiB is too large to encrypt"):
            space_of(store, 2 << 30)


@pytest.mark.parametrize("raw", [_KEY, _KEY.hex().encode(), _KEY.hex().upper().encode() + b"\n"])
def test_a_key_is_32_bytes_or_64_digits(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "key").write_bytes(raw)
    assert read_key(tmp_path / "key") == _KEY
    files = sealing_files(tmp_path / "key")
    assert files is not None
    assert files.cipher is not None
    assert sealing_files(None) is None


@pytest.mark.parametrize("raw", [b"", b"short", bytes(31), b"z" * 64, b"0" * 63, b"0" * 10_000])
def test_what_is_no_key_is_refused_in_a_sentence(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "key").write_bytes(raw)
    with pytest.raises(ConfigError, match="key holds no encryption key: it has 32 bytes, or 64 hexadecimal digits"):
        read_key(tmp_path / "key")
    with pytest.raises(ConfigError, match="nowhere cannot be read: No such file"):
        read_key(tmp_path / "nowhere")
