"""Room for blocks: regions tile the space, neighbours join, room is found."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.space import Space, TakenRegion


def check_tiling(space: Space) -> None:
    regions = list(space.regions())
    start = 0
    for region in regions:
        assert region.start == start
        assert region.size > 0
        start += region.size
    assert start == space.num_units
    assert all(left.right is right and right.left is left for left, right in pairwise(regions))
    assert not any(left.is_free and right.is_free for left, right in pairwise(regions))
    assert space.free_units == sum(region.size for region in regions if region.is_free)


def starts(regions: list[TakenRegion]) -> list[int]:
    return [region.start for region in regions]


def test_regions_come_in_one_run_while_there_is_one() -> None:
    space = Space(100)

    assert starts(space.take(4, 5, TakenRegion)) == [0, 5, 10, 15]
    assert space.free_units == 80
    check_tiling(space)


def test_a_space_that_is_used_up_gives_what_it_has() -> None:
    space = Space(10)

    assert len(space.take(9, 3, TakenRegion)) == 3
    assert space.take(1, 3, TakenRegion) == []
    assert len(space.take(1, 1, TakenRegion)) == 1
    assert space.free_units == 0
    check_tiling(space)


def test_an_empty_space_gives_nothing() -> None:
    assert Space(0).take(1, 1, TakenRegion) == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_freed_neighbours_join_in_any_order(order: tuple[int, ...]) -> None:
    space = Space(9)
    taken = space.take(3, 3, TakenRegion)
    for position in order:
        space.give_back(taken[position])
        check_tiling(space)

    assert [(region.start, region.size) for region in space.regions()] == [(0, 9)]
    assert len(space.take(1, 9, TakenRegion)) == 1


def test_room_between_two_regions_is_found_again() -> None:
    space = Space(30)
    taken = space.take(3, 10, TakenRegion)
    space.give_back(taken[1])

    assert starts(space.take(2, 5, TakenRegion)) == [10, 15]


def test_a_request_is_gathered_from_several_runs_when_none_holds_it_all() -> None:
    space = Space(30)
    taken = space.take(6, 5, TakenRegion)
    space.give_back(taken[0])
    space.give_back(taken[3])
    space.give_back(taken[4])

    assert sorted(starts(space.take(3, 5, TakenRegion))) == [0, 15, 20]


@given(st.integers(1, 200), st.data())
def test_a_region_is_found_whenever_a_free_one_holds_it(num_units: int, data: st.DataObject) -> None:
    space = Space(num_units)
    held: list[TakenRegion] = []
    for _ in range(data.draw(st.integers(1, 12))):
        if held and data.draw(st.booleans()):
            space.give_back(held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            size = data.draw(st.integers(1, 40))
            count = data.draw(st.integers(1, 6))
            fitting = sum(region.size // size for region in space.regions() if region.is_free)
            taken = space.take(count, size, TakenRegion)
            assert len(taken) == min(count, fitting)
            assert all(region.size == size for region in taken)
            held += taken
        check_tiling(space)
    assert space.free_units + sum(region.size for region in held) == num_units


def test_free_units_at_the_end_are_cut_off_and_added_again() -> None:
    space = Space(12)
    taken = space.take(3, 3, TakenRegion)
    space.cut(2)
    assert (space.num_units, space.free_units) == (10, 1)
    space.cut(1)
    check_tiling(space)
    assert not space.has_room(1)
    space.extend(4)
    check_tiling(space)
    assert starts(space.take(1, 4, TakenRegion)) == [9]
    space.give_back(taken[2])
    check_tiling(space)


def test_a_space_cut_to_nothing_can_grow_again() -> None:
    space = Space(5)
    space.cut(5)
    assert (space.num_units, space.free_units, space.has_room(1)) == (0, 0, False)
    space.extend(3)
    check_tiling(space)
    assert starts(space.take(3, 1, TakenRegion)) == [0, 1, 2]
