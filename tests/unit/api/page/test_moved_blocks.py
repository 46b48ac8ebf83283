"""Bytes that a cache server moves, from the blocks that it counts."""

from __future__ import annotations

from kvtier.api.page.moved_blocks import Move, MovedBlocks

_DISK = {"disk_used_bytes": 1000, "disk_blocks": 10}


def test_blocks_count_as_many_bytes_as_one_has_there() -> None:
    moved = MovedBlocks("cache")
    moved.take({**_DISK, "disk_written_blocks": 50, "disk_read_blocks": 7})
    found = moved.take({**_DISK, "disk_written_blocks": 52, "disk_read_blocks": 7})

    assert found == {Move("in", "disk", "cache"): 200.0, Move("out", "disk", "cache"): 0.0}


def test_what_a_server_counts_anew_after_its_restart_is_added() -> None:
    moved = MovedBlocks("cache")
    for written in (50, 52, 1, 4):
        found = moved.take({**_DISK, "disk_written_blocks": written})
    assert found[Move("in", "disk", "cache")] == 600.0


def test_an_average_that_changes_does_not_change_what_was_counted() -> None:
    moved = MovedBlocks("cache")
    moved.take({"used_bytes": 100, "blocks": 10, "stored_blocks": 1_000_000})
    moved.take({"used_bytes": 100, "blocks": 10, "stored_blocks": 1_000_001})
    found = moved.take({"used_bytes": 2000, "blocks": 10, "stored_blocks": 1_000_001})
    assert found[Move("in", "memory", "cache")] == 10.0


def test_odd_counts_are_nothing() -> None:
    moved = MovedBlocks("cache")
    odd: dict[str, object] = {"used_bytes": "x", "blocks": float("nan"), "stored_blocks": -5, "hit_blocks": None}
    moved.take(odd)
    assert set(moved.take({**odd, "stored_blocks": float("inf")}).values()) == {0.0}
