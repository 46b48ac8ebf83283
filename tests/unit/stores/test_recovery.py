"""What is believed of records found on opening, and what stays under a smaller budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier import BlockHash, Namespace
from kvtier.stores.records import HEADER_BYTES, RECORD_BYTES, UNIT_BYTES, BlockRecord
from kvtier.stores.recovery import choose, counted_anew, fit, units_of

_STEP_BYTES = 64 << 10


def _record(
    key: int, start: int, sequence: int, *, units: int = 1, used_at: int = 0, pinned: bool = False
) -> BlockRecord:
    namespace = Namespace(bytes([units]) * 32)
    block_hash = BlockHash(key.to_bytes(32, "little"))
    return BlockRecord(namespace, block_hash, start, units * UNIT_BYTES, 16, sequence, used_at, key, "", pinned)


def test_the_newer_of_two_records_for_one_key_or_room_counts() -> None:
    found = {0: _record(1, 0, 5), 1: _record(1, 3, 6), 2: _record(2, 7, 1, units=2), 3: _record(3, 8, 2)}
    kept, losses = choose(found, 100)
    assert kept.keys() == {1, 3}
    assert losses == {"replaced": 2}


def test_a_copy_of_a_record_is_no_loss_and_one_beyond_the_file_is() -> None:
    found = {0: _record(1, 0, 5), 9: _record(1, 0, 5), 3: _record(2, 99, 1, units=2)}
    kept, losses = choose(found, 100)
    assert list(kept.values()) == [_record(1, 0, 5)]
    assert losses == {"truncated": 1}


def test_counts_begin_anew_in_the_order_they_had() -> None:
    far = 1 << 60
    records = {4: _record(1, 0, far, used_at=3), 1: _record(2, 1, 7, used_at=far), 9: _record(3, 2, 8, used_at=5)}
    anew = counted_anew(records)
    assert {number: (record.sequence, record.used_at) for number, record in anew.items()} == {
        4: (3, 1),
        1: (1, 3),
        9: (2, 2),
    }
    assert [record._replace(sequence=0, used_at=0) for record in anew.values()] == [
        record._replace(sequence=0, used_at=0) for record in records.values()
    ]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.booleans()), max_size=60),
    st.integers(0, 120),
)
def test_what_fits_is_the_warmest_and_lies_where_nothing_else_does(
    blocks: list[tuple[int, int, bool]], data_units: int
) -> None:
    records: dict[int, BlockRecord] = {}
    start = 0
    for key, (units, gap, pinned) in enumerate(blocks):
        start += gap
        used_at = (key * 7919) % 1009
        records[key * 5] = _record(key, start, key + 1, units=units, used_at=used_at, pinned=pinned)
        start += units
    limit = HEADER_BYTES + _STEP_BYTES + data_units * UNIT_BYTES

    plan = fit(records, limit, _STEP_BYTES)

    places = {number: (record.start, units_of(record)) for number, record in plan.kept.items()}
    places |= {number: (start, units_of(record)) for number, (record, start) in plan.moved.items()}
    assert places.keys() | set(plan.dropped) == records.keys()
    assert not places.keys() & set(plan.dropped)
    taken = [unit for start, units in places.values() for unit in range(start, start + units)]
    assert len(taken) == len(set(taken)), "two blocks in one place"
    assert all(unit < plan.data_units for unit in taken)
    assert plan.data_units * UNIT_BYTES + plan.records_bytes <= limit
    sources = {
        unit for record, _ in plan.moved.values() for unit in range(record.start, record.start + units_of(record))
    }
    targets = {unit for record, start in plan.moved.values() for unit in range(start, start + units_of(record))}
    assert not sources & targets, "a block that moves is whole where it was until its record says otherwise"
    num_records = (plan.records_bytes - HEADER_BYTES) // RECORD_BYTES
    numbers = [plan.renumbered.get(number, number) for number in places]
    assert len(set(numbers)) == len(numbers)
    assert all(number < num_records for number in numbers)
    if all(units == 1 for units, _, _ in blocks):  # nothing is lost to gaps then
        warmth = {number: (record.is_pinned, record.used_at) for number, record in records.items()}
        assert len(places) == min(len(records), plan.data_units)
        if places and plan.dropped:
            assert min(warmth[number] for number in places) >= max(warmth[number] for number in plan.dropped)
