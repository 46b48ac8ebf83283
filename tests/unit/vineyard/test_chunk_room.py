"""How much a process may write into a folder that others write into as well."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.vineyard import chunk_room
from kvtier.vineyard.chunk_files import ChunkFiles
from kvtier.vineyard.chunk_room import ChunkRoom

UNIT = 8192
OTHER = f"0123456789ab.1.1.00000000-{UNIT}-0.room"


@pytest.fixture
def store(tmp_path: Path) -> ChunkFiles:
    store = ChunkFiles(tmp_path, 4096)
    assert store.file_bytes == UNIT
    return store


def nothing() -> frozenset[str]:
    return frozenset()


def announced(store: ChunkFiles) -> int:
    """In chunks, over all processes."""
    return sum(path.stat().st_size for path in store.temp.glob("*.room")) // UNIT


def put(store: ChunkFiles, numbers: range, used_at: float | None = None) -> list[Path]:
    """Chunks as another process would have written them."""
    paths = [store.root / "ab" / f"{number:064x}-{number}" for number in numbers]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(UNIT))
        if used_at is not None:
            os.utime(path, (used_at, used_at))
    return paths


def announce(store: ChunkFiles, num_chunks: int) -> Path:
    path = store.temp / OTHER
    path.touch()
    os.truncate(path, num_chunks * UNIT)
    return path


def test_what_is_reserved_is_announced_until_it_is_written(store: ChunkFiles) -> None:
    room = ChunkRoom(store, 10 * UNIT)

    assert room.reserve(4 * UNIT, nothing) == 4 * UNIT
    assert announced(store) == 4
    room.account_for(written=3 * UNIT, unused=UNIT)
    assert announced(store) == 1
    room.close()
    assert announced(store) == 0


def test_no_more_than_the_bound_is_given_and_no_more_than_others_leave(store: ChunkFiles) -> None:
    room = ChunkRoom(store, 10 * UNIT)
    announce(store, 7)

    assert room.reserve(20 * UNIT, nothing) == 3 * UNIT
    assert announced(store) == 10


def test_two_writers_never_have_more_than_the_bound_together(store: ChunkFiles, tmp_path: Path) -> None:
    first, second = ChunkRoom(store, 10 * UNIT), ChunkRoom(ChunkFiles(tmp_path, 4096), 10 * UNIT)

    assert first.reserve(6 * UNIT, nothing) == 6 * UNIT
    assert second.reserve(6 * UNIT, nothing) == 4 * UNIT
    assert announced(store) == 10


def test_more_than_is_needed_is_announced_so_that_not_every_write_lists(store: ChunkFiles) -> None:
    room = ChunkRoom(store, 320 * UNIT)
    room.reserve(UNIT, nothing)

    assert announced(store) == 21, "a sixteenth in advance"


def test_several_writers_share_what_is_announced_in_advance(store: ChunkFiles) -> None:
    announce(store, 1)
    room = ChunkRoom(store, 320 * UNIT)
    room.reserve(UNIT, nothing)

    assert announced(store) == 1 + 1 + 10


def test_writers_that_begin_at_once_all_get_what_there_is_room_for(store: ChunkFiles, tmp_path: Path) -> None:
    rooms = [ChunkRoom(ChunkFiles(tmp_path, 4096), 68 * UNIT) for _ in range(32)]

    assert [room.reserve(2 * UNIT, nothing) for room in rooms] == [2 * UNIT] * 32


def test_what_is_in_advance_is_given_back_by_who_is_idle(store: ChunkFiles) -> None:
    room = ChunkRoom(store, 320 * UNIT)
    room.reserve(UNIT, nothing)
    room.account_for(written=UNIT, unused=0)

    room.beat()
    assert announced(store) == 20, "it was not idle"
    room.beat()
    assert announced(store) == 0


def test_the_coldest_go_and_only_as_many_as_must(store: ChunkFiles) -> None:
    room = ChunkRoom(store, 10 * UNIT)
    old = put(store, range(4), used_at=1e9)
    new = put(store, range(4, 10))

    assert room.reserve(3 * UNIT, nothing) == 3 * UNIT

    assert [path.exists() for path in old] == [True, False, False, False], "of one time, the deepest first"
    assert all(path.exists() for path in new)
    assert room.counts.evicted_chunks == 3


def test_what_must_stay_stays_and_less_is_given(store: ChunkFiles) -> None:
    room = ChunkRoom(store, 10 * UNIT)
    kept = [str(path) for path in put(store, range(8), used_at=1e9)]
    put(store, range(8, 10))

    assert room.reserve(5 * UNIT, lambda: kept) == 2 * UNIT
    assert all(os.path.exists(path) for path in kept)


def test_nothing_goes_when_nothing_could_be_given(store: ChunkFiles) -> None:
    room = ChunkRoom(store, 10 * UNIT)
    paths = put(store, range(5))
    announce(store, 10)

    assert room.reserve(3 * UNIT, nothing) == 0
    assert all(path.exists() for path in paths)
    assert room.counts.evicted_chunks == 0


def test_a_larger_bound_of_a_living_writer_holds(store: ChunkFiles) -> None:
    room = ChunkRoom(store, 2 * UNIT)
    paths = put(store, range(5))
    other = store.temp / f"0123456789ab.1.1.00000000-{UNIT}-{10 * UNIT}.room"
    other.touch()

    assert room.reserve(20 * UNIT, lambda: set(map(str, paths))) == 5 * UNIT
    room.account_for(written=0, unused=5 * UNIT)
    os.utime(other, (1e9, 1e9))
    room.trim()
    assert sum(path.exists() for path in paths) <= 2
    room.close()


def test_chunks_and_writers_of_other_sizes_do_not_count(store: ChunkFiles) -> None:
    room = ChunkRoom(store, 10 * UNIT)
    (other,) = put(store, range(1), used_at=1e9)
    os.truncate(other, 100 * UNIT)
    os.utime(other, (1e9, 1e9))
    announced_other = store.temp / f"0123456789ab.1.1.00000000-{100 * UNIT}-{1000 * UNIT}.room"
    announced_other.touch()
    os.truncate(announced_other, 500 * UNIT)

    assert room.reserve(20 * UNIT, nothing) == 10 * UNIT
    assert other.exists()
    assert room.expire(100) == 1, "by age, all of them"


def test_a_long_listing_shows_life(store: ChunkFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    room = ChunkRoom(store, 10 * UNIT)
    (ours,) = store.temp.glob("*.room")
    put(store, range(1))
    entries_of = chunk_room._entries

    def entries(folder: str) -> Iterator[os.DirEntry[str]]:
        if folder == str(store.temp):
            found = list(entries_of(folder))
            os.utime(ours, (1e9, 1e9))  # so long did that take
            return iter(found)
        return entries_of(folder)

    monkeypatch.setattr(chunk_room, "_entries", entries)
    monkeypatch.setattr(chunk_room, "BEAT_S", 0.0)
    room.sweep()
    assert ours.stat().st_mtime > 1e9
    room.close()


def test_trimming_brings_a_folder_back_to_the_bound(store: ChunkFiles) -> None:
    paths = put(store, range(30))
    room = ChunkRoom(store, 10 * UNIT)

    room.trim()

    assert sum(path.exists() for path in paths) == 10
    assert all(path.exists() for path in paths[:10])


@pytest.mark.parametrize(
    "act", [lambda room: room.trim(), lambda room: room.reserve(UNIT, nothing)], ids=["trim", "reserve"]
)
def test_a_silent_writers_announcement_goes(store: ChunkFiles, act: Callable[[ChunkRoom], object]) -> None:
    path = announce(store, 10)
    os.utime(path, (1e9, 1e9))
    room = ChunkRoom(store, 10 * UNIT)

    act(room)

    assert not path.exists()


def test_an_announcement_that_was_removed_is_made_again(store: ChunkFiles) -> None:
    room = ChunkRoom(store, 10 * UNIT)
    room.reserve(4 * UNIT, nothing)
    for path in store.temp.iterdir():
        path.unlink()

    room.beat()

    assert announced(store) == 4


def test_empty_folders_go_with_what_is_old(store: ChunkFiles) -> None:
    room = ChunkRoom(store, 10 * UNIT)
    put(store, range(1), used_at=1e9)
    (store.root / "notes").mkdir()
    os.utime(store.root / "ab", (1e9, 1e9))

    assert room.expire(100) == 1
    os.utime(store.root / "ab", (1e9, 1e9))
    assert room.expire(100) == 0

    assert not (store.root / "ab").exists()
    assert (store.root / "notes").exists()


def test_what_could_not_be_checked_is_not_granted_later(store: ChunkFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    room = ChunkRoom(store, 10 * UNIT)
    put(store, range(9))

    def fail(self: ChunkRoom, now: float) -> None:
        raise OSError("no listing")

    with monkeypatch.context() as patch:
        patch.setattr(ChunkRoom, "_list", fail)
        with pytest.raises(OSError, match="no listing"):
            room.reserve(8 * UNIT, nothing)
    kept = {str(path) for path in store.root.glob("ab/*")}

    assert room.reserve(8 * UNIT, lambda: kept) == UNIT
    room.close()


def test_a_chunk_that_is_done_while_another_looks_is_counted(
    store: ChunkFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may count twice then, as announced and as there, but never not at all."""
    room = ChunkRoom(store, 10 * UNIT)
    put(store, range(4))
    other = announce(store, 4)
    entries_of = chunk_room._entries
    num_looks = 0

    def entries(folder: str) -> Iterator[os.DirEntry[str]]:
        nonlocal num_looks
        num_looks += 1
        found = list(entries_of(folder))
        if num_looks == 1:  # what is looked at next has changed meanwhile
            put(store, range(10, 14))
            os.truncate(other, 0)
        return iter(found)

    monkeypatch.setattr(chunk_room, "_entries", entries)
    granted = room.reserve(4 * UNIT, lambda: {str(path) for path in store.root.glob("ab/*")})
    assert granted <= 2 * UNIT
    room.account_for(written=0, unused=granted)
    room.close()
