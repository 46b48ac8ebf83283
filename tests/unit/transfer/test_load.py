"""A load between the engine's thread and a tier's: who brings which block, and what holds once it is abandoned."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.memory.lease import EmptyLease
from kvtier.transfer.copier import Copies
from kvtier.transfer.load import Load, LoadPlan, Order, Span
from tests.support.examples import examples
from tests.support.host_device import Arrived, Past


def load_of(order: Order, first: int = 2, end: int = 10) -> Load:
    """Block 100 + position of the device is for the block at that position of the prompt."""
    span = Span("server", "server", 0, 20, EmptyLease(MatchEnd.ALL), 0)
    hashes = [BlockHash(bytes([position]) * 32) for position in range(first, end)]
    plan = LoadPlan(span, first, end, order, None, 1)
    return Load(plan, hashes, [100 + position for position in range(first, end)], Past(), 0.0)


def write(load: Load, first: int, end: int) -> list[int] | None:
    transfer = load.write(first, end, Arrived)
    return transfer.block_ids if isinstance(transfer, Arrived) else None


# --- from the front ----------------------------------------


def test_from_the_front_blocks_are_taken_in_order_until_none_is_left() -> None:
    load = load_of(Order.FRONT)

    assert [load.take(3) for _ in range(4)] == [(2, 5), (5, 8), (8, 10), (10, 10)]


def test_from_the_front_what_has_arrived_begins_with_the_first_block() -> None:
    load = load_of(Order.FRONT)
    load.take(3)

    assert write(load, 2, 4) == [102, 103]
    assert load.arrived() == (2, 4)
    assert load.num_arrived == 2


def test_from_the_front_there_is_nothing_to_claim() -> None:
    load = load_of(Order.FRONT)

    assert load.claim(5) == 0
    load.take(3)
    assert load.claim(5) == 0


# --- from the back ----------------------------------------


def test_from_the_back_both_sides_meet() -> None:
    load = load_of(Order.BACK)

    assert load.take(3) == (7, 10)
    assert load.claim(4) == 4
    assert load.take(3) == (6, 7)
    assert load.take(3) == (6, 6)
    assert load.claim(1) == 0
    assert load.num_left == 0


def test_both_sides_have_met_only_when_nothing_is_on_its_way() -> None:
    load = load_of(Order.BACK)
    load.take(3)
    load.claim(5)
    assert not load.has_met
    write(load, 7, 10)
    assert not load.has_met

    load.end()

    assert load.has_met
    assert load.arrived() == (7, 10)


def test_what_was_taken_from_the_back_and_did_not_come_is_left_to_the_engine() -> None:
    load = load_of(Order.BACK)
    load.take(2)
    write(load, 8, 10)
    load.take(4)
    load.claim(9)
    assert load.num_left == 0

    load.end()

    assert load.num_left == 4
    assert not load.has_met
    assert load.claim(9) == 4
    assert load.has_met


# --- abandoned ----------------------------------------


def test_once_abandoned_nothing_is_taken_or_written() -> None:
    for order in Order:
        load = load_of(order)
        taken = load.take(3)
        transfers = [load.write(*taken, Arrived)]

        assert load.abandon() == transfers
        assert load.take(3) == (0, 0)
        assert write(load, 5, 7) is None
        assert load.num_arrived == 3


def test_what_is_left_of_an_abandoned_load_from_the_back_is_the_engines() -> None:
    load = load_of(Order.BACK)
    write(load, *load.take(2))
    load.take(2)
    load.claim(1)

    load.abandon()

    assert load.claim(100) == 5
    assert load.has_met


@given(
    order=st.sampled_from(list(Order)),
    acts=st.lists(st.tuples(st.sampled_from(["take", "write", "claim", "abandon", "end"]), st.integers(0, 5))),
)
def test_no_block_is_brought_twice_whatever_the_order(order: Order, acts: list[tuple[str, int]]) -> None:
    load = load_of(order)
    written: list[int] = []
    claimed: list[int] = []
    taken: tuple[int, int] | None = None
    is_over = False
    for act, count in acts:
        if act == "take" and taken is None and not is_over:
            taken = load.take(count)
            assert taken[1] - taken[0] <= count
            assert not set(range(*taken)) & {*written, *claimed}
        elif act == "write" and taken is not None:
            if taken[1] > taken[0]:
                written += [block_id - 100 for block_id in write(load, *taken) or ()]
            taken = None
        elif act == "claim":
            front = load.front
            claimed += range(front, front + load.claim(count))
        elif act == "abandon":
            load.abandon()
        elif act == "end" and taken is None:
            load.end()
            is_over = True
    assert len(set(written + claimed)) == len(written + claimed)
    assert set(written + claimed) <= set(range(2, 10))
    first, end = load.arrived()
    assert sorted(written) == list(range(first, end))
    if load.has_met and order is Order.BACK:
        assert sorted(written + claimed) == list(range(2, 10))


# --- with threads ----------------------------------------


@given(seed=st.integers(0, 1000), is_abandoned=st.booleans(), unit=st.integers(1, 5))
@settings(max_examples=examples(60), deadline=None)
def test_two_threads_bring_every_block_once(seed: int, is_abandoned: bool, unit: int) -> None:
    load = load_of(Order.BACK, 0, 200)
    written: list[int] = []
    num_after: list[int] = []
    abandoned = threading.Event()

    def begin(block_ids: Sequence[int]) -> Copies:
        num_after.append(abandoned.is_set())
        written.extend(block_id - 100 for block_id in block_ids)
        return Arrived(block_ids)

    def bring() -> None:
        while True:
            first, end = load.take(unit)
            if first >= end or load.write(first, end, begin) is None:
                break
        load.end()

    chance = random.Random(seed)
    thread = threading.Thread(target=bring, name="kvtier-test")
    thread.start()
    claimed: list[int] = []
    while not load.has_met:
        front = load.front
        claimed += range(front, front + load.claim(chance.randint(0, 7)))
        if is_abandoned and chance.random() < 0.2:
            load.abandon()
            abandoned.set()
    thread.join()

    assert sorted(claimed + written) == list(range(200))
    assert load.arrived() == (len(claimed), 200)
    assert not any(num_after), "written after it was abandoned"
