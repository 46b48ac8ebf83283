"""A folder on disk as a tier, for a process without a cache server. Thread-safe.

The same store as the cache server's: what was offered survives the process, within a bound, and no wrong byte comes
back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace
from kvtier.errors import BlockCorrupt, ConfigError, TierFull, TierUnavailable
from kvtier.memory.copying import Buffer, byte_views
from kvtier.memory.lease import BlockLease, EmptyLease, Lease
from kvtier.sizes import format_size
from kvtier.stores.disk import DiskStore, StoredBlock, Written
from kvtier.stores.files import Files

_NUM_THREADS = 8
_PART_BYTES = 2 << 20


class DiskTier:
    """At most `file_space` bytes of everything in `folder`, for blocks of one namespace."""

    def __init__(
        self,
        folder: Path,
        file_space: int,
        *,
        layout: KvLayout,
        namespace: Namespace,
        label: str = "",
        name: str = "disk",
        files: Files | None = None,
    ) -> None:
        """Raises `ConfigError` when the folder cannot be used."""
        self.name = name
        self.layout = layout
        self.store = DiskStore(folder, file_space, files=files)
        try:
            self._space = self.store.open(namespace, label, layout.block_bytes, layout.block_tokens)
        except BaseException:
            self.store.close()
            raise
        self._io = ThreadPoolExecutor(_NUM_THREADS, "kvtier-disk")

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        blocks, ended = self.store.match_ended(self._space, hashes)
        if not blocks:
            return EmptyLease(ended)

        def pull(wanted: Sequence[BlockHash], into: Sequence[memoryview]) -> int:
            return self._read(blocks[: len(wanted)], into)

        def end() -> None:
            self.store.free(blocks)

        return BlockLease(
            None,
            [block.start for block in blocks],
            self.layout.block_bytes,
            hashes[: len(blocks)],
            ended,
            pull,
            lambda count: count,
            len(blocks),
            end,
            lambda: self._free_later(blocks),
        )

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        """Stored when it returns: the end of the process loses none of it."""
        if len(hashes) != len(blocks):
            raise ConfigError(f"{len(hashes)} hashes for {len(blocks)} blocks")
        views = byte_views(blocks, self.layout.block_bytes, writable=False)
        parts = self._parts(len(hashes))

        def write(part: slice) -> list[Written]:
            return self.store.write(self._space, hashes[part], views[part])

        writes = [self._io.submit(write, part) for part in reversed(parts)]
        wait(writes)  # all of them: what fails must not go on behind the caller's back
        try:
            outcomes = [outcome for done in writes for outcome in done.result()]
        except OSError as error:
            raise TierUnavailable(f"the disk failed: {error.strerror or error}") from error
        self.store.touch(self._space, hashes)  # threads wrote them in any order
        num_written = outcomes.count(Written.NEW)
        if not num_written and Written.NO_ROOM in outcomes:
            raise TierFull(f"the disk has no room for a block of {format_size(self.layout.block_bytes)}")
        return num_written

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return self.store.contains(self._space, hashes)

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        try:
            return self.store.drop(self._space, hashes)
        except OSError as error:
            raise TierUnavailable(f"the disk failed: {error.strerror or error}") from error

    def close(self) -> None:
        self._io.shutdown()
        self.store.close()

    def _read(self, blocks: Sequence[StoredBlock], into: Sequence[memoryview]) -> int:
        """How many leading blocks arrived whole."""

        def read(part: slice) -> list[BlockCorrupt | None]:
            return self.store.read(blocks[part], into[part])  # the store has counted what is corrupt

        failed = [why is not None for part in self._io.map(read, self._parts(len(blocks))) for why in part]
        return failed.index(True) if True in failed else len(failed)

    def _parts(self, count: int) -> list[slice]:
        """Blocks by the handful: few enough for all threads to have work, enough for small blocks to be cheap."""
        step = max(1, min(_PART_BYTES // self.layout.slot_bytes, count // _NUM_THREADS))
        return [slice(first, min(first + step, count)) for first in range(0, count, step)]

    def _free_later(self, blocks: Sequence[StoredBlock]) -> None:
        """From the collector, which must not wait for the store's lock."""
        with contextlib.suppress(RuntimeError):  # shut down already
            self._io.submit(self.store.free, blocks)
