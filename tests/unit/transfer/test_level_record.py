"""Where pages are, asked in parts: every change is told once, and what is forgotten is told as gone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.transfer.level_record import Level, LevelRecord
from kvtier.wire.messages import LISTED_DISK, LISTED_DOWN, LISTED_EVICTED, LISTED_MEMORY

_BOTH = Level.MEMORY | Level.DISK


class Bench:
    """A record over flags by hash. `told` is what its user knows of the pages."""

    def __init__(self, max_blocks: int = 100) -> None:
        self.now = 0.0
        self.flags: dict[BlockHash, int] = {}
        self.asked: list[int] = []
        self.record: LevelRecord[str] = LevelRecord(self._look, max_blocks=max_blocks, clock=lambda: self.now)
        self.told: dict[str, Level] = {}

    def _look(self, hashes: Sequence[BlockHash]) -> list[int]:
        self.asked.append(len(hashes))
        return [self.flags.get(one, 0) for one in hashes]

    def add(self, name: str, num_blocks: int = 1) -> None:
        self._tell(self.record.add(name.encode(), _blocks(name, num_blocks), name))

    def put(self, name: str, flags: int, num_blocks: int = 1) -> None:
        self.flags |= dict.fromkeys(_blocks(name, num_blocks), flags)

    def ask(self, max_blocks: int = 1000) -> None:
        self._tell(self.record.ask(max_blocks))

    def _tell(self, changes: Sequence[object]) -> None:
        for change in changes:
            before = self.told.get(change.entry, Level.NONE)  # type: ignore[attr-defined]
            assert not before & change.gained, "told twice"  # type: ignore[attr-defined]
            assert before & change.lost == change.lost, "lost what was not there"  # type: ignore[attr-defined]
            self.told[change.entry] = (before | change.gained) & ~change.lost  # type: ignore[attr-defined]


def _blocks(name: str, count: int) -> list[BlockHash]:
    return [BlockHash(f"{name} {number}".encode()) for number in range(count)]


def test_a_page_is_told_of_when_all_of_its_blocks_are_there() -> None:
    bench = Bench()
    bench.add("page", 2)
    bench.ask()
    bench.put("page", LISTED_MEMORY)
    bench.ask()
    assert bench.told == {}

    bench.put("page", LISTED_MEMORY, 2)
    bench.ask()

    assert bench.told == {"page": Level.MEMORY}


def test_a_page_moves_to_disk_and_is_gone() -> None:
    bench = Bench()
    bench.add("page")
    told = []
    for flags in (LISTED_MEMORY, LISTED_MEMORY | LISTED_DISK, LISTED_DISK, LISTED_EVICTED):
        bench.put("page", flags)
        bench.ask()
        told.append(bench.told["page"])

    assert told == [Level.MEMORY, _BOTH, Level.DISK, Level.NONE]
    assert b"page" not in bench.record


def test_nothing_changes_while_the_server_does_not_answer() -> None:
    bench = Bench()
    bench.add("page")
    bench.put("page", LISTED_MEMORY)
    bench.ask()
    bench.put("page", LISTED_DOWN)
    bench.ask()

    assert bench.told == {"page": Level.MEMORY}
    assert b"page" in bench.record


def test_a_page_that_is_never_stored_is_forgotten_without_a_word() -> None:
    bench = Bench()
    bench.add("page")
    bench.ask()
    assert b"page" in bench.record
    bench.now = 60.0
    bench.ask()

    assert bench.told == {}
    assert bench.record.num_pages == 0


def test_the_oldest_are_forgotten_and_told_as_gone() -> None:
    bench = Bench(max_blocks=3)
    for number in range(5):
        bench.add(str(number))
        bench.put(str(number), LISTED_MEMORY)
        bench.ask()

    assert bench.told == dict.fromkeys("01", Level.NONE) | dict.fromkeys("234", Level.MEMORY)
    assert bench.record.num_pages == 3


def test_a_part_is_asked_at_a_time_and_all_have_their_turn() -> None:
    bench = Bench()
    for number in range(20):
        bench.add(str(number))
        bench.put(str(number), LISTED_MEMORY)
    for _ in range(5):
        bench.ask(4)
    assert bench.told == {str(number): Level.MEMORY for number in range(20)}

    for number in range(20):
        bench.put(str(number), 0)
    for _ in range(5):
        bench.ask(4)

    assert set(bench.told.values()) == {Level.NONE}
    assert max(bench.asked) == 4


def test_new_pages_are_asked_for_first() -> None:
    bench = Bench()
    for number in range(20):
        bench.add(str(number))
        bench.put(str(number), LISTED_MEMORY)
    bench.ask()
    bench.add("new")
    bench.put("new", LISTED_MEMORY)
    bench.ask(1)

    assert bench.told["new"] is Level.MEMORY


def test_after_starting_over_everything_is_told_again() -> None:
    bench = Bench()
    for name in "ab":
        bench.add(name)
        bench.put(name, LISTED_MEMORY)
    bench.ask()
    bench.told = {}
    bench.record.start_over()
    bench.put("b", 0)
    bench.ask()

    assert bench.told == {"a": Level.MEMORY}


def test_whatever_happens_what_was_told_is_what_is_there_in_the_end() -> None:
    dice = random.Random(0)
    bench = Bench(max_blocks=24)
    names = [str(number) for number in range(40)]
    for _ in range(500):
        name = dice.choice(names)
        bench.put(name, dice.choice([0, LISTED_MEMORY, LISTED_DISK, LISTED_MEMORY | LISTED_DISK, LISTED_DOWN]), 2)
        if name.encode() not in bench.record:
            bench.add(name, 2)
        bench.ask(dice.randint(1, 10))
    for name in names:
        bench.put(name, LISTED_DISK, 2)
    bench.ask()

    assert {name for name, level in bench.told.items() if level} == {
        name for name in names if name.encode() in bench.record
    }
    assert set(bench.told.values()) == {Level.NONE, Level.DISK}
