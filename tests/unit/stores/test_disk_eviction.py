"""The bound of a disk store, and its order of eviction: an exact LRU, also after a restart."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierFull
from kvtier.stores.disk import DiskStore
from kvtier.stores.folder import MIN_FILE_BYTES
from tests.support.store_building import (
    MIB,
    OTHER_NAMESPACE,
    crashed,
    hash_of,
    opened,
    read_rightly,
    size_of,
    space_of,
    stored_among,
    use,
    write,
)


def test_the_folder_never_exceeds_the_bound_whatever_is_written(tmp_path: Path) -> None:
    with opened(tmp_path, 3 * MIB) as store:
        for number in range(2000):
            write(store, space_of(store), [number])
            assert size_of(tmp_path) <= 3 * MIB
        assert len(read_rightly(store, space_of(store), range(2000))) > 600


def test_other_files_in_the_folder_count(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(bytes(MIB))
    with opened(tmp_path, 3 * MIB) as store:
        write(store, space_of(store), range(1000))
        assert size_of(tmp_path) <= 3 * MIB
    with pytest.raises(ConfigError, match=r"other files in .* take 1MiB of the 1MiB allowed"):
        DiskStore(tmp_path, MIB)


def test_too_small_a_file_space_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file space must be at least"):
        DiskStore(tmp_path, MIN_FILE_BYTES - 1)
    with opened(tmp_path, MIN_FILE_BYTES) as store:
        write(store, space_of(store), range(5))
        assert read_rightly(store, space_of(store), range(5)) == {4}


def test_a_block_larger_than_the_file_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        write(store, space_of(store), range(20))
        with pytest.raises(TierFull):
            write(store, space_of(store, 2 * MIB, OTHER_NAMESPACE), [1])
        assert read_rightly(store, space_of(store), range(20)) == set(range(20))


def test_the_hit_rate_of_a_zipf_like_load_is_that_of_an_exact_lru_before_and_after_a_restart(tmp_path: Path) -> None:
    file_space = 4 * MIB
    with opened(tmp_path / "probe", file_space) as store:
        space = space_of(store)
        write(store, space, range(1100))
        capacity = len(space.index)
        assert store.levels()["evicted_blocks"] == 1100 - capacity
    rng = random.Random(1)
    num_keys = 4 * capacity
    weights = list(itertools.accumulate(1 / (rank + 1) ** 0.8 for rank in range(num_keys)))
    model: OrderedDict[int, None] = OrderedDict()
    num_written = 0
    for _ in range(2):
        hits = model_hits = 0
        with opened(tmp_path / "store", file_space) as store:
            space = space_of(store)
            for number in rng.choices(range(num_keys), cum_weights=weights, k=5000):
                if use(store, space, number):
                    hits += 1
                else:
                    write(store, space, [number])
                    num_written += 1
                model_hits += number in model
                model[number] = None
                model.move_to_end(number)
                if len(model) > capacity:
                    model.popitem(last=False)
            assert store.losses == {}
        assert 0.2 < model_hits / 5000 < 0.9
        assert abs(hits - model_hits) / 5000 < 0.01
    assert num_written > 2 * capacity


def test_recency_survives_a_restart_and_recovered_blocks_are_evicted_coldest_first(tmp_path: Path) -> None:
    with opened(tmp_path, 2 * MIB) as store:
        space = space_of(store)
        write(store, space, range(600))
        there = stored_among(store, space, range(600))
        assert len(there) < 500, "it must be full"
        warmed = sorted(there)[:50]
        for number in warmed:
            use(store, space, number)
    with opened(tmp_path, 2 * MIB) as store:
        space = space_of(store)
        assert stored_among(store, space, range(600)) == there
        write(store, space, range(1000, 1000 + len(there) - 60))
        left = stored_among(store, space, range(600))
        assert set(warmed) <= left
        assert left - set(warmed) <= set(sorted(there)[-20:]), "the coldest went first"


def test_a_saved_recency_survives_a_crash(tmp_path: Path) -> None:
    with opened(tmp_path / "store", MIB) as store:
        space = space_of(store)
        write(store, space, range(100))
        for number in range(10):
            use(store, space, number)
        store.flush(fsync=False)
        left = crashed(tmp_path / "store", tmp_path / "left")
    with opened(left, MIB) as store:
        space = space_of(store)
        write(store, space, range(1000, 1170))
        assert store.levels()["evicted_blocks"] > 20
        assert set(range(10)) <= stored_among(store, space, range(100))


def test_a_smaller_budget_evicts_and_the_file_shrinks(tmp_path: Path) -> None:
    with opened(tmp_path, 8 * MIB) as store:
        write(store, space_of(store), range(1500))
        warm = range(600, 650)
        for number in warm:
            use(store, space_of(store), number)
        assert size_of(tmp_path) > 5 * MIB
    with opened(tmp_path, 2 * MIB) as store:
        assert size_of(tmp_path) <= 2 * MIB
        there = read_rightly(store, space_of(store), range(1500))
        assert len(there) > 400
        assert there == set(warm) | set(range(1500 - len(there) + len(warm), 1500)), "the coldest went"
        assert store.losses == {"over the budget": 1500 - len(there)}
        write(store, space_of(store), range(2000, 2100))
        assert read_rightly(store, space_of(store), range(2000, 2100)) == set(range(2000, 2100))
        assert size_of(tmp_path) <= 2 * MIB
    with opened(tmp_path, 2 * MIB) as store:
        assert read_rightly(store, space_of(store), range(2000, 2100)) == set(range(2000, 2100))
        assert store.losses == {}


def test_a_larger_budget_lets_the_file_grow(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        write(store, space_of(store), range(300))
        there = stored_among(store, space_of(store), range(300))
        assert len(there) < 250
    with opened(tmp_path, 6 * MIB) as store:
        write(store, space_of(store), range(1000, 1900))
        assert read_rightly(store, space_of(store), range(1000, 1900)) == set(range(1000, 1900))
        assert read_rightly(store, space_of(store), range(300)) == there, "nothing had to go"


def test_pins_survive_a_restart_and_any_flood(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        space = space_of(store)
        write(store, space, range(20))
        assert store.pin(space, [hash_of(number) for number in range(10)]) == 10
    with opened(tmp_path, MIB) as store:
        space = space_of(store)
        assert sum(is_pinned for _, is_pinned in store.blocks(space)) == 10
        assert store.levels()["pinned_bytes"] == store.levels()["used_bytes"] * 10 // store.levels()["blocks"]
        write(store, space, range(1000, 1500))
        assert read_rightly(store, space, range(20)) == set(range(10))
        assert store.unpin(space, [hash_of(number) for number in range(10)]) == 10
    with opened(tmp_path, MIB) as store:
        space = space_of(store)
        write(store, space, range(2000, 2500))
        assert read_rightly(store, space, range(20)) == set()


def test_pins_beyond_half_of_the_budget_are_not_made(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        space = space_of(store)
        write(store, space, range(180))
        num_pinned = store.pin(space, [hash_of(number) for number in range(180)])
        assert 100 < num_pinned < 130
        write(store, space, range(1000, 1200))


def test_more_pinned_than_a_smaller_budget_holds_is_no_end_of_the_store(tmp_path: Path) -> None:
    with opened(tmp_path, 6 * MIB) as store:
        space = space_of(store)
        write(store, space, range(1100))
        store.pin(space, [hash_of(number) for number in range(1100)])
    for _ in range(2):
        with opened(tmp_path, MIB) as store:
            space = space_of(store)
            there = read_rightly(store, space, range(1100))
            store.flush(fsync=False)
            assert size_of(tmp_path) <= MIB
            store.unpin(space, [hash_of(number) for number in there])
            write(store, space, range(2000, 2010))
            assert read_rightly(store, space, range(2000, 2010)) == set(range(2000, 2010))
            assert read_rightly(store, space, range(1100)) <= there


def test_a_store_full_of_references_takes_nothing_and_loses_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        space = space_of(store)
        write(store, space, range(300))
        there = sorted(stored_among(store, space, range(300)))
        held = [store.match(space, [hash_of(number)]) for number in there]
        with pytest.raises(TierFull):
            write(store, space, [1000])
        for blocks in held:
            store.free(blocks)
        write(store, space, [1000])
        assert read_rightly(store, space, range(300)) == set(there[1:]), "the one that was freed first went"
