"""A store on a machine whose power is cut: what a flush with fsync covered is there, and no wrong byte comes back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtier.stores.disk import DiskStore
from tests.support.power_cut import PowerCutFiles
from tests.support.store_building import MIB, UNIT, crashed, hash_of, payload, read, space_of

_BLOCK_BYTES = 3 * UNIT


def test_what_was_synced_survives_a_power_cut_right_after_a_smaller_budget(tmp_path: Path) -> None:
    files = PowerCutFiles()
    store = DiskStore(tmp_path / "store", 6 * MIB, files=files)
    space = space_of(store, UNIT)
    for number in range(1000):
        store.write(space, [hash_of(number)], [memoryview(payload(hash_of(number), UNIT))])
    store.flush(fsync=True)
    store.close()
    store = DiskStore(tmp_path / "store", 2 * MIB, files=files)
    kept = {block_hash for block_hash, _ in store.blocks(space_of(store, UNIT))}
    files.cut(random.Random(1))
    left = crashed(tmp_path / "store", tmp_path / "left")
    store.close()

    store = DiskStore(left, 2 * MIB)
    try:
        assert len(kept) > 350
        there = {hash_of(number) for number in range(1000) if read(store, space_of(store, UNIT), number) is not None}
        assert kept <= there
    finally:
        store.close()


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("seed", range(25))
def test_what_was_synced_survives_a_power_cut_and_the_rest_is_right_or_absent(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = PowerCutFiles()
    store = DiskStore(tmp_path / "store", 2 * MIB, files=files)
    space = space_of(store, _BLOCK_BYTES)
    synced: set[int] = set()
    written: set[int] = set()
    number = 0
    num_steps = rng.randrange(20, 120)
    for step in range(num_steps):
        match 7 if step == num_steps - 1 else rng.randrange(8):
            case 0:
                store.flush(fsync=True)
                synced = {one for one in written if store.contains(space, [hash_of(one)])[0]}
            case 1 if written:
                dropped = rng.choice(sorted(written))
                store.drop(space, [hash_of(dropped)])
                synced.discard(dropped)
            case 2:
                store.flush(fsync=False)
            case _:
                numbers = range(number, number + rng.randrange(1, 9))
                number = numbers.stop
                hashes = [hash_of(one) for one in numbers]
                store.write(space, hashes, [memoryview(payload(key, _BLOCK_BYTES)) for key in hashes])
                written.update(numbers)
    evicted = {one for one in synced if not store.contains(space, [hash_of(one)])[0]}
    num_lost = files.cut(rng)
    left = crashed(tmp_path / "store", tmp_path / "left")
    store.close()

    assert num_lost > 0
    store = DiskStore(left, 2 * MIB)
    try:
        space = space_of(store, _BLOCK_BYTES)
        for one in written:
            found = read(store, space, one)
            assert found is None or found == payload(hash_of(one), _BLOCK_BYTES), f"block {one} is wrong"
            assert found is not None or one not in synced - evicted, f"block {one} was synced and is gone"
    finally:
        store.close()
