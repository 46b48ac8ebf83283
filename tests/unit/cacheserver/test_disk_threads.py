"""What the disk's threads count is counted by one of them at a time."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

from kvtier.cacheserver.disk_threads import DiskReader, _Read
from kvtier.memory.mapped import MappedArena


class _WatchedReader(DiskReader):
    """Notes whether the lock was held at each change of the count."""

    def __init__(self, store: Any, arena: MappedArena) -> None:
        self.locked: list[bool] = []
        super().__init__(store, arena)

    @property  # type: ignore[override]
    def num_read(self) -> int:
        return self._num_read

    @num_read.setter
    def num_read(self, count: int) -> None:
        self.locked.append(self._condition._is_owned())  # type: ignore[attr-defined]
        self._num_read = count


def test_readers_count_under_the_lock_that_they_share() -> None:
    disk = SimpleNamespace(read=lambda stored, views: [None, None], free=lambda stored: None)
    store = SimpleNamespace(condition=threading.Condition(), num_using=2)
    stored = SimpleNamespace(checksum=1)
    ended: list[Any] = []
    with contextlib.closing(MappedArena.create(8192)) as arena:
        reader = _WatchedReader(store, arena)
        reader._owner = SimpleNamespace(end_loading=lambda blocks, arrived: ended.append(arrived))  # type: ignore[assignment]
        batch: Any = [_Read(None, 4096, disk, stored, SimpleNamespace(start=place)) for place in (0, 1)]  # type: ignore[arg-type]
        reader._carry_out(batch)

    assert reader.num_read == 2
    assert reader.locked == [False, True]
    assert ended == [[True, True]]
    assert store.num_using == 0
