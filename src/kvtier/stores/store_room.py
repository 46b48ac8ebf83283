"""The room of a disk store: growth of both files within the budget, free records, and wipes of records. Thread-safe.

`_lock` is the store's own: it guards the pool and the accounts, and is never held over I/O. `_meta_lock` orders the
files' growth. `wipe_lock` keeps wipes and updates of one record apart.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvtier.blocks.pool import BlockPool
from kvtier.blocks.share import Share
from kvtier.sizes import format_size
from kvtier.stores.opening import SPARE_RECORDS
from kvtier.stores.payload_file import PayloadFile
from kvtier.stores.record_file import RecordFile
from kvtier.stores.records import UNIT_BYTES
from kvtier.stores.stored_block import StoredBlock

logger = logging.getLogger(__name__)

_MIN_GROWTH_BYTES = 1 << 20
_MAX_GROWTH_BYTES = 256 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreRoom:
    """`pool` has the payloads' units; a block needs units and a record."""

    def __init__(
        self,
        folder: Path,
        pool: BlockPool,
        lock: threading.Lock,
        payloads: PayloadFile,
        records: RecordFile,
        file_space: int,
        limit_bytes: int,
        step_bytes: int,
        free_records: Iterable[int],
    ) -> None:
        self.wipe_lock = threading.Lock()
        self._folder = folder
        self._pool = pool
        self._lock = lock
        self._meta_lock = threading.Lock()
        self._payloads = payloads
        self._records = records
        self._file_space = file_space
        self._limit_bytes = limit_bytes
        self._step_bytes = step_bytes
        self._free_records = deque(free_records)
        self._to_wipe: list[StoredBlock] = []
        self._num_wiping = 0
        self._is_full = False

    # --- with the store's lock -------------------------------------------------------------------------------------

    def should_grow(self, units: int) -> bool:
        return not self._is_full and not self._pool.has_room(units) and self._growable_units() > 0

    @property
    def can_grow(self) -> bool:
        return not self._is_full and self._growable_units() > 0

    @property
    def must_wipe(self) -> bool:
        """Records of evicted blocks are yet to be wiped: `wipe_evicted` waits for that."""
        return bool(self._to_wipe) or self._num_wiping > 0

    @property
    def max_data_units(self) -> int:
        """The units that payloads may have beside the records of now."""
        return (self._limit_bytes - self._records.nbytes) // UNIT_BYTES

    def give_records(self, numbers: Iterable[int]) -> None:
        self._free_records.extend(numbers)

    def wipe_later(self, blocks: Iterable[StoredBlock]) -> None:
        """Have the records of `blocks` wiped before their room or their records are reused."""
        self._to_wipe += blocks

    # --- without it ------------------------------------------------------------------------------------------------

    def take_records(self, block_units: int, count: int, requester: Share) -> list[int]:
        """Numbers for up to `count` records, after growing the files as far as allowed and needed. May do I/O.

        Empty only if everything is in use.
        """
        with self._lock:
            if len(self._free_records) >= count and not self.should_grow(count * block_units):
                return [self._free_records.popleft() for _ in range(count)]
        with self._meta_lock:
            self._grow(count * block_units, block_units)
            if not self._free_records and not self._add_records(block_units):
                with self._lock:
                    self._pool.evict(1, requester)
        if not self._free_records:
            self.wipe_evicted()
        with self._lock:
            return [self._free_records.popleft() for _ in range(min(count, len(self._free_records)))]

    def wipe_evicted(self) -> None:
        """Wipe the records of all blocks evicted so far, before anything is written to their room."""
        with self._lock:
            self._num_wiping += 1
        try:
            with self.wipe_lock:
                with self._lock:
                    blocks, self._to_wipe = self._to_wipe, []
                try:
                    self._wipe(blocks)
                except BaseException:
                    with self._lock:
                        self._to_wipe += blocks
                    raise
        finally:
            with self._lock:
                self._num_wiping -= 1

    def wipe(self, blocks: Sequence[StoredBlock]) -> None:
        """Wipe the records of blocks that were dropped; if that fails, before their room is reused."""
        try:
            with self.wipe_lock:
                self._wipe(blocks)
        except BaseException:
            with self._lock:
                self.wipe_later(blocks)
            raise

    def try_growing_again(self) -> None:
        """A disk that was full may have room again."""
        self._is_full = False

    def _wipe(self, blocks: Sequence[StoredBlock]) -> None:
        self._records.wipe(block.record for block in blocks)
        with self._lock:
            self._free_records.extend(block.record for block in blocks)

    def _growable_units(self) -> int:
        return self.max_data_units - self._pool.num_units

    def _grow(self, units: int, block_units: int) -> None:
        """Extend the file by at least `units`, if allowed, with records for it; a full disk means a smaller budget."""
        with self._lock:
            if not self.should_grow(units):
                return
        step = min(max(self._limit_bytes // 64, _MIN_GROWTH_BYTES), _MAX_GROWTH_BYTES)
        step = max(step // UNIT_BYTES, units)
        # Records come first: once payloads had all the room, more records would cost payloads at the file's end.
        needed = (self._pool.free_units + min(step, self._growable_units())) // block_units
        needed += min(needed // 8, SPARE_RECORDS)  # for blocks in progress while their victims' records are wiped
        while (
            len(self._free_records) < needed
            and self._growable_units() > self._step_bytes // UNIT_BYTES
            and self._add_records(block_units)
        ):
            pass
        size = self._pool.num_units * UNIT_BYTES
        step = min(step, self._growable_units()) * UNIT_BYTES
        if step <= 0:
            return
        while True:
            try:
                self._payloads.allocate(size, step)
                break
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
                step = step // 2 // UNIT_BYTES * UNIT_BYTES
                if step < block_units * UNIT_BYTES:
                    self._say_full(size)
                    return
        with self._lock:
            self._pool.extend(step // UNIT_BYTES)

    def _add_records(self, block_units: int) -> bool:
        """Add a step of records, in the room of payloads at the file's end if blocks of this size lack records."""
        with self._lock:
            missing = self._step_bytes // UNIT_BYTES - self._growable_units()
            if missing > 0 and self._records.num_records * block_units >= self._pool.num_units:
                return False
            if missing > 0 and (missing > self._pool.num_units or not self._pool.shrink(missing)):
                return False
        if missing > 0:
            self.wipe_evicted()
            self._payloads.cut(self._pool.num_units * UNIT_BYTES)
        try:
            numbers = self._records.grow(self._step_bytes)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            self._say_full(self._pool.num_units * UNIT_BYTES)
            return False
        with self._lock:
            self._free_records.extend(numbers)
        return True

    def _say_full(self, size: int) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "disk store %s: the disk is full; continuing with %s of %s",
                self._folder,
                format_size(size),
                format_size(self._file_space),
            )
