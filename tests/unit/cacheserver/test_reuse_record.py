from __future__ import annotations

import bisect
import os
import threading
import tracemalloc

import pytest

from kvtier.blocks.hashing import HASH_BYTES
from kvtier.cacheserver.recent_blocks import MAX_BLOCKS
from kvtier.cacheserver.reuse_record import RecordedUse, ReuseRecord
from tests.support.prompt_traffic import hashed, lru_hit_share, sessions

UNIT_BYTES = 4096
ANY_SIZE = 1 << 40


def share_at(use: RecordedUse, num_bytes: float) -> float:
    sizes = [size for size, _ in use.points]
    return use.points[bisect.bisect_left(sizes, num_bytes)][1]


def record_of(prompts: list[tuple[int, ...]], *, block_units: int = 1, max_units: int = ANY_SIZE) -> ReuseRecord:
    record = ReuseRecord(UNIT_BYTES, max_units)
    for prompt in prompts:
        record.note_asked(hashed(prompt), block_units, 16)
    return record


def test_nothing_asked_gives_no_curve() -> None:
    assert ReuseRecord(UNIT_BYTES, ANY_SIZE).read() == RecordedUse(0, 0, 0, 0.0, 1.0, [])


def test_few_blocks_are_all_looked_at() -> None:
    prompts = sessions(4, 10)
    use = record_of(prompts).read()

    assert use.sampled_share == 1
    assert use.num_requests == len(prompts)
    assert use.asked_tokens == 16 * sum(map(len, prompts))
    for num_blocks in (16, 32, 64, 128, 256):
        assert share_at(use, num_blocks * UNIT_BYTES) == pytest.approx(lru_hit_share(prompts, num_blocks), abs=0.01)


def test_a_sample_is_within_three_points_of_exact_lru_at_every_size() -> None:
    prompts = sessions(150, 12, seed=5)
    use = record_of(prompts).read()

    assert use.sampled_share < 0.5
    for num_blocks in (128, 256, 512, 1024, 2048, 4096, 8192):
        assert share_at(use, num_blocks * UNIT_BYTES) == pytest.approx(lru_hit_share(prompts, num_blocks), abs=0.03)


def test_a_block_that_every_prompt_begins_with_counts_as_often_as_it_was_asked_for() -> None:
    prompts = [(0, 2 * number + 1, 2 * number + 2) for number in range(9000)]
    use = record_of(prompts).read()

    assert use.sampled_share < 1
    assert use.points[-1][1] == pytest.approx(1 / 3, abs=0.001)


def test_sizes_are_in_bytes_over_namespaces_with_blocks_of_different_sizes() -> None:
    record = ReuseRecord(UNIT_BYTES, ANY_SIZE)
    small, large = hashed(tuple(range(10))), hashed(tuple(range(100, 110)))
    for _ in range(2):
        record.note_asked(small, 1, 16)
        record.note_asked(large, 8, 16)

    use = record.read()
    # The second round hits all 20 blocks where 90 units are kept, and none where fewer than those of the other.
    assert share_at(use, 8 * UNIT_BYTES) == 0
    assert share_at(use, 104 * UNIT_BYTES) == pytest.approx(0.5)


def test_stored_blocks_that_nobody_asked_for_are_hit_later() -> None:
    record = ReuseRecord(UNIT_BYTES, ANY_SIZE)
    record.note_asked(hashed((1, 2)), 1, 16)
    record.note_stored(hashed((1, 2, 3, 4)), 1)
    record.note_asked(hashed((1, 2, 3, 4)), 1, 16)

    assert share_at(record.read(), 8 * UNIT_BYTES) == pytest.approx(4 / 6)


def test_huge_requests_and_requests_without_blocks_do_no_harm() -> None:
    record = ReuseRecord(UNIT_BYTES, ANY_SIZE)
    record.note_asked(b"", 1, 16)
    record.note_asked(os.urandom(100_000 * HASH_BYTES), 1, 16)
    record.note_asked(bytes(50_000 * HASH_BYTES), 1, 16)

    assert record.read().num_requests == 2


@pytest.mark.parametrize("num_blocks", [20, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 300))])
def test_the_record_stays_within_two_mebibytes(num_blocks: int) -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        record = ReuseRecord(UNIT_BYTES, ANY_SIZE)
        for _ in range(2 * MAX_BLOCKS // num_blocks + 1500):
            record.note_asked(os.urandom(num_blocks * HASH_BYTES), 1, 16)
            assert tracemalloc.get_traced_memory()[0] - before < 2 << 20
    finally:
        tracemalloc.stop()


def test_blocks_beyond_the_wanted_sizes_are_forgotten_rather_than_sampled_less() -> None:
    record = ReuseRecord(UNIT_BYTES, 1000)
    for number in range(20_000):
        record.note_asked(hashed((number,)), 1, 16)

    use = record.read()
    assert use.sampled_share == 1
    assert use.points[-1][0] <= 1000 * UNIT_BYTES


def test_threads_may_note_and_read_at_the_same_time() -> None:
    record = ReuseRecord(UNIT_BYTES, ANY_SIZE)

    def note(first: int) -> None:
        for number in range(300):
            record.note_asked(hashed((first, first + number)), 1, 16)
        record.read()

    threads = [threading.Thread(target=note, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert record.read().num_requests == 1200
