"""Which records found on opening are valid, and how to fit them into a smaller budget. Pure."""

from __future__ import annotations

import bisect
import operator
from collections import Counter
from dataclasses import dataclass

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import slot_bytes_of
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.space import Space, TakenRegion
from kvtier.stores.records import HEADER_BYTES, RECORD_BYTES, UNIT_BYTES, BlockRecord

_SEAL_OF, _SEQUENCE_OF, _USED_AT_OF = map(operator.attrgetter, ("seal", "sequence", "used_at"))


def any_sealed(records: dict[int, BlockRecord]) -> bool:
    return any(map(_SEAL_OF, records.values()))


def units_of(record: BlockRecord) -> int:
    return slot_bytes_of(record.block_bytes) // UNIT_BYTES


def choose(found: dict[int, BlockRecord], file_units: int) -> tuple[dict[int, BlockRecord], Counter[str]]:
    """The valid records: inside the file, the newest of those that claim one key or room. And losses by kind."""
    losses: Counter[str] = Counter()
    keys: dict[tuple[Namespace, BlockHash], BlockRecord] = {}
    sizes: dict[Namespace, int] = {}
    kept: list[tuple[int, BlockRecord]] = []
    for number, record in sorted(found.items(), key=lambda item: item[1].sequence, reverse=True):
        key = (record.namespace, record.hash)
        if record.start + units_of(record) > file_units:
            losses["truncated"] += 1
        elif (same := keys.get(key)) is not None:
            losses["replaced"] += same != record  # a copy left by moving records is no loss
        elif sizes.setdefault(record.namespace, record.block_bytes) != record.block_bytes:
            losses["replaced"] += 1
        else:
            keys[key] = record
            kept.append((number, record))
    kept.sort(key=lambda item: item[1].start)
    return dict(_without_overlaps(kept, losses)), +losses


def last_counts(records: dict[int, BlockRecord]) -> tuple[int, int]:
    """The last `sequence` and the last `used_at`; 0 if there are none."""
    return max(map(_SEQUENCE_OF, records.values()), default=0), max(map(_USED_AT_OF, records.values()), default=0)


def counted_anew(records: dict[int, BlockRecord]) -> dict[int, BlockRecord]:
    """The same records in the same orders, with `sequence` and `used_at` renumbered from 1."""
    by_sequence = sorted(records, key=lambda number: records[number].sequence)
    by_use = sorted(records, key=lambda number: records[number].used_at)
    sequences = {number: count for count, number in enumerate(by_sequence, 1)}
    uses = {number: count for count, number in enumerate(by_use, 1)}
    return {
        number: record._replace(sequence=sequences[number], used_at=uses[number]) for number, record in records.items()
    }


def _without_overlaps(kept: list[tuple[int, BlockRecord]], losses: Counter[str]) -> list[tuple[int, BlockRecord]]:
    """Drop the older of two records with overlapping ranges: its wipe was lost."""
    chosen: list[tuple[int, BlockRecord]] = []
    end = 0
    for number, record in kept:
        if record.start < end:
            losses["replaced"] += 1
            if record.sequence < chosen[-1][1].sequence:
                continue
            chosen.pop()
        chosen.append((number, record))
        end = record.start + units_of(record)
    return chosen


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    """How to shrink a store: `kept` stay, `moved` get new units, `dropped` are removed. In this order: drop, move, cut.

    `renumbered` are records, of kept and moved blocks, that lie beyond the records' new end: old number to new.
    """

    kept: dict[int, BlockRecord]
    moved: dict[int, tuple[BlockRecord, int]]
    dropped: list[int]
    renumbered: dict[int, int]
    data_units: int
    records_bytes: int


def fit(records: dict[int, BlockRecord], limit_bytes: int, step_bytes: int) -> ShrinkPlan:
    """Keep pinned blocks, then the most recently used, as many as fit."""
    warm_first = sorted(records.items(), key=lambda item: (item[1].is_pinned, item[1].used_at), reverse=True)
    units = 0
    wanted: dict[int, BlockRecord] = {}
    for number, record in warm_first:
        nbytes = (units + units_of(record)) * UNIT_BYTES
        if nbytes + _records_bytes(len(wanted) + 1, step_bytes) <= limit_bytes:
            units += units_of(record)
            wanted[number] = record
    records_bytes = _records_bytes(len(wanted), step_bytes)
    data_units = (limit_bytes - records_bytes) // UNIT_BYTES
    kept, moved = _place(wanted, data_units)
    staying = kept.keys() | moved.keys()
    num_records = (records_bytes - HEADER_BYTES) // RECORD_BYTES
    free = (number for number in range(num_records) if number not in staying)
    beyond = sorted(number for number in staying if number >= num_records)
    return ShrinkPlan(
        kept,
        moved,
        sorted(records.keys() - staying),
        dict(zip(beyond, free, strict=False)),
        data_units,
        records_bytes,
    )


def _place(
    wanted: dict[int, BlockRecord], data_units: int
) -> tuple[dict[int, BlockRecord], dict[int, tuple[BlockRecord, int]]]:
    """Which blocks stay, and which move where. Pinned blocks may take the room of others, which are then dropped."""
    kept: dict[int, BlockRecord] = {}
    moved: dict[int, tuple[BlockRecord, int]] = {}
    taken: list[tuple[int, int]] = []
    for is_pinned in (True, False):
        some = {number: record for number, record in wanted.items() if record.is_pinned == is_pinned}
        targets = sorted((start, start + units_of(record)) for record, start in moved.values())
        for number, record in list(some.items()):
            if _overlaps(record, targets):
                del some[number]
            elif record.start + units_of(record) <= data_units:
                kept[number] = some.pop(number)
                taken.append((record.start, units_of(record)))
            elif record.start < data_units:
                # It lies across the new end and is read there before it moves: no other block may be written there.
                taken.append((record.start, data_units - record.start))
        regions = [TakenRegion(start, size) for start, size in sorted(taken)]
        space = Space.restored(data_units, regions)
        for number, record in some.items():
            if found := space.take(1, units_of(record), TakenRegion):
                moved[number] = (record, found[0].start)
                taken.append((found[0].start, units_of(record)))
    return kept, moved


def _overlaps(record: BlockRecord, ranges: list[tuple[int, int]]) -> bool:
    """Whether it shares a unit with one of the ranges, which are sorted and disjoint."""
    end = record.start + units_of(record)
    place = bisect.bisect_left(ranges, (end, 0))
    return place > 0 and ranges[place - 1][1] > record.start


def _records_bytes(num_blocks: int, step_bytes: int) -> int:
    return HEADER_BYTES + max(1, -(-num_blocks * RECORD_BYTES // step_bytes)) * step_bytes
