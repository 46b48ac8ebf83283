"""Blocks in flight: a host's bound is divided among the connections that are in use, not among all there could be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.stores.valkey.window import paced

MIB = 1 << 20


def in_flight(count: int, block_bytes: int, num_busy: Callable[[], int]) -> list[int]:
    """How many commands are unanswered before each reply is read."""
    found, num_sent = [], 0
    for num_read, num_more in enumerate(paced(count, block_bytes, num_busy)):
        num_sent += num_more
        found.append(num_sent - num_read)
    assert num_sent == count
    return found


@pytest.mark.parametrize(
    ("block_bytes", "num_busy", "most"),
    [
        (MIB, 1, 16),
        (MIB, 2, 16),
        (MIB, 6, 10),
        (MIB, 16, 4),
        (MIB, 128, 1),
        (MIB, 0, 16),
        (100 * MIB, 1, 1),
        (1, 500, 16),
    ],
)
def test_one_connection_gets_its_share_of_the_bound(block_bytes: int, num_busy: int, most: int) -> None:
    found = in_flight(100, block_bytes, lambda: num_busy)

    assert max(found) == most
    assert min(found) >= 1


def test_the_share_follows_the_number_of_connections_in_use() -> None:
    busy = iter([1] * 30 + [64] * 70)
    found = in_flight(100, MIB, lambda: next(busy))

    assert max(found[:30]) == 16
    assert max(found[50:]) == 1


@pytest.mark.parametrize("count", [0, 1, 3, 16, 17])
def test_few_blocks_are_all_sent_at_once(count: int) -> None:
    assert list(paced(count, MIB, lambda: 1))[:1] == [min(count, 16)][: min(count, 1)]
    in_flight(count, MIB, lambda: 1)
