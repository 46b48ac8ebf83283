"""Bytes that engines move, from what they count."""

from __future__ import annotations

from kvtier.api.page.moved_blocks import Move
from kvtier.api.page.moved_bytes import MovedBytes


def test_the_first_count_of_an_engine_is_where_it_begins() -> None:
    moved = MovedBytes()
    moved.take("one", {("out", "server"): 1000.0})
    moved.take("one", {("out", "server"): 1300.0, ("out", "disk"): 50.0, ("in", "server"): 7.0, ("in", "disk"): 5.0})
    assert moved.all() == {
        Move("out", "server"): 300.0,
        Move("out", "disk"): 50.0,
        Move("in", "server"): 7.0,
        Move("in", "disk"): 5.0,
        Move("in", "device", "one"): 350.0,
        Move("out", "device", "one"): 7.0,
    }


def test_the_sum_over_engines_does_not_fall_and_leap_when_one_is_started_again() -> None:
    moved = MovedBytes()
    sums = []
    for one, other in ((1000.0, 500.0), (1100.0, None), (1200.0, 3.0), (1200.0, 10.0)):
        moved.take("one", {("in", "server"): one})
        if other is not None:
            moved.take("other", {("in", "server"): other})
        sums.append(moved.all()[Move("in", "server")])
    assert sums == [0.0, 100.0, 203.0, 210.0]
