"""A folder on disk as a tier, for a process without a cache server. Thread-safe.

The same store as the cache server's: what was offered survives the process, within a bound, and no wrong byte comes
back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace
from kvtier.errors import BlockCorrupt, ConfigError, TierFull, TierUnavailable
from kvtier.memory.copying import Buffer, byte_views
from kvtier.memory.lease import BlockLease, EmptyLease, Lease
from kvtier.stores.disk import DiskStore, StoredBlock
from kvtier.stores.files import Files

_NUM_THREADS = 8


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
        blocks = self.store.match(self._space, hashes)
        if not blocks:
            return EmptyLease("miss" if hashes else "all")

        def pull(wanted: Sequence[BlockHash], into: Sequence[memoryview]) -> int:
            return self._read(blocks[: len(wanted)], into)

        def end() -> None:
            self.store.free(blocks)

        ended = "all" if len(blocks) == len(hashes) else "miss"
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
        full: list[TierFull] = []

        def write(position: int) -> bool:
            try:
                return self.store.write(self._space, hashes[position], views[position])
            except TierFull as error:
                full.append(error)
                return False

        try:
            num_written = sum(self._io.map(write, reversed(range(len(hashes)))))
        except OSError as error:
            raise TierUnavailable(f"the disk failed: {error.strerror or error}") from error
        self.store.touch(self._space, hashes)  # threads wrote them in any order
        if full and not num_written:
            raise full[0]
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

        def read(position: int) -> bool:
            with contextlib.suppress(BlockCorrupt):  # the store has counted it
                self.store.read(blocks[position], into[position])
                return True
            return False

        arrived = list(self._io.map(read, range(len(blocks))))
        return arrived.index(False) if False in arrived else len(arrived)

    def _free_later(self, blocks: Sequence[StoredBlock]) -> None:
        """From the collector, which must not wait for the store's lock."""
        with contextlib.suppress(RuntimeError):  # shut down already
            self._io.submit(self.store.free, blocks)
