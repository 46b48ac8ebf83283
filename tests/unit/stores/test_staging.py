"""Aligned memory: used again while it is needed, given back when it is not."""

from __future__ import annotations

from kvtier.stores.staging import PAGE_BYTES, StagingPool

_BYTES = 4 * PAGE_BYTES


def test_what_was_given_is_taken_again() -> None:
    pool = StagingPool(_BYTES)
    first = pool.take()
    pool.give(first)

    assert pool.take() is first
    assert pool.take() is not first


def test_what_nobody_has_needed_since_the_last_time_goes() -> None:
    pool = StagingPool(_BYTES)
    for staging in [pool.take() for _ in range(5)]:
        pool.give(staging)

    pool.trim()
    assert pool.idle_bytes == 5 * _BYTES, "all were needed a moment ago"
    for staging in [pool.take() for _ in range(2)]:
        pool.give(staging)
    pool.trim()
    assert pool.idle_bytes == 2 * _BYTES, "two at once were needed since"
    pool.trim()
    assert pool.idle_bytes == 0


def test_memory_is_aligned_and_a_payload_takes_whole_pages_behind_the_head() -> None:
    staging = StagingPool(_BYTES).take()

    assert staging.address % PAGE_BYTES == 0
    assert [len(part) for part in staging.parts_of(PAGE_BYTES + 1)] == [PAGE_BYTES, 2 * PAGE_BYTES]
