"""Scopes over blocks in an arena: leases to read, reservations to write. Both are context managers.

If the blocks are in memory of this process, views cost no copy. A view must not be used after its lease: it is released
with the lease, and a lease whose views are still exported (for instance to numpy) refuses to end. Wrong bytes are worse
than an exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import ConfigError, LeaseError
from kvtier.memory.copying import Buffer, address_of, byte_views, copy_blocks
from kvtier.memory.mapped import MappedArena

logger = logging.getLogger(__name__)

_Export: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"

_WAIT_BLOCKS = 8

DISK = "disk"
CLUSTER = "cluster"
"""Values of `Lease.stored_in`: where a cache server has blocks that it must read first."""

_IN_USE = "views of these blocks are still in use, by an array or another view: drop those first"


def _references(exports: Sequence[_Export], position: int) -> int:
    return sys.getrefcount(exports[position])


_IDLE = _references([(ctypes.c_ubyte * 1)()], 0)


class Lease(Protocol):
    """The longest cached prefix of the requested blocks, safe from eviction until `release`.

    `ended` says why the match ended there.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def ended(self) -> MatchEnd: ...

    @property
    def num_stored(self) -> int:
        """After a lazy match: how many blocks follow unleased, on disk or in a cluster. `ended` applies to the
        block behind those."""
        ...

    @property
    def stored_in(self) -> str:
        """Where most of the `num_stored` blocks are: "disk" or "cluster"."""
        ...

    @property
    def num_ready_at_match(self) -> int:
        """The number of leading blocks that were in the tier's memory; the others were still being loaded."""
        ...

    @property
    def arena(self) -> MappedArena | None:
        """The arena of `offsets`, if the blocks are in an arena of this host."""
        ...

    @property
    def offsets(self) -> Sequence[int]:
        """The places of the blocks in `arena`; meaningless without one."""
        ...

    @property
    def has_views(self) -> bool:
        """Whether the blocks are in memory of this process, so that `views` costs no copy."""
        ...

    def wait(self, count: int | None = None) -> int:
        """Wait until the first `count` blocks (all by default) are loaded, for example from disk. Returns how many are.

        If fewer, the others are lost, and `num_blocks` is smaller from now on.
        """
        ...

    def views(self, first: int = 0, count: int | None = None) -> list[memoryview]:
        """Read-only views of blocks, valid until `release`. Waits for them. Raises `LeaseError` if there are none."""
        ...

    def fetch(self, into: Sequence[Buffer], first: int = 0) -> int:
        """Copy blocks from `first` on into the caller's buffers. Returns how many leading ones arrived."""
        ...

    def release(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Scope:
    """The common part of leases and reservations: views of an arena, and a single end.

    `forget` stands in for `end` when the garbage collector finds a scope that was never ended: it must not block or
    lock.
    """

    _is_over = True  # until construction is complete

    def __init__(
        self,
        arena: MappedArena | None,
        offsets: Sequence[int],
        block_bytes: int,
        end: Callable[[], None],
        forget: Callable[[], None],
    ) -> None:
        self._arena = arena
        self._end = end
        self._forget = forget
        self.offsets = offsets
        self._block_bytes = block_bytes
        self._views: dict[int, memoryview] = {}
        self._exports: list[_Export] = []
        self._is_over = False

    @property
    def num_blocks(self) -> int:
        return len(self.offsets)

    @property
    def has_views(self) -> bool:
        return self._arena is not None

    @property
    def arena(self) -> MappedArena | None:
        return self._arena

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._finish()
        except LeaseError:
            if error is None:
                raise
            logger.warning("views are still in use after an error; their blocks stay leased")

    def __del__(self) -> None:
        """End a scope that was never ended. If its views are alive, its blocks stay leased until the process ends."""
        if self._is_over:
            return
        warnings.warn(f"a {type(self).__name__} was never ended; use `with`", ResourceWarning, stacklevel=2)
        try:
            self._end_views()
        except LeaseError:
            logger.warning("views of a forgotten lease are still in use; their blocks stay leased")
            return
        self._forget()

    def _finish(self) -> None:
        if self._is_over:
            return
        self._end_views()
        self._is_over = True
        self._end()

    def _open_views(self, first: int, count: int, *, readonly: bool) -> list[memoryview]:
        self._check()
        if self._arena is None:
            raise LeaseError("these blocks are not in memory of this process and have no views: fetch them")
        if first < 0:
            raise LeaseError(f"there is no block {first}")
        known = self._views
        missing = [position for position in range(first, first + count) if position not in known]
        with self._arena.in_use():
            exports = self._arena.exports([self.offsets[position] for position in missing], self._block_bytes)
        views = [memoryview(export).cast("B") for export in exports]
        known.update(zip(missing, [view.toreadonly() for view in views] if readonly else views, strict=True))
        self._exports += exports
        return [known[position] for position in range(first, first + count)]

    def _check(self) -> None:
        if self._is_over:
            raise LeaseError("this lease or reservation has ended")

    def _end_views(self) -> None:
        for view in self._views.values():
            with contextlib.suppress(BufferError):  # an array holds it, which the count below also shows
                view.release()
        self._views = {}
        # A view made from one of ours survives its release, but keeps the export alive.
        in_use = [position for position in range(len(self._exports)) if _references(self._exports, position) > _IDLE]
        self._exports = [self._exports[position] for position in in_use]
        if self._exports:
            raise LeaseError(_IN_USE)

    def _addresses(self) -> list[int]:
        assert self._arena is not None
        base = self._arena.address
        return [base + offset for offset in self.offsets]


class BlockLease(_Scope):
    """A lease of one tier. Not thread-safe. `offsets` are places in `arena`; without one, `pull` fetches the bytes.

    The first `num_ready` blocks are in the tier's memory; `arrive` waits for more, and returns how many are there then.
    """

    def __init__(
        self,
        arena: MappedArena | None,
        offsets: Sequence[int],
        block_bytes: int,
        hashes: Sequence[BlockHash],
        ended: MatchEnd,
        pull: Callable[[Sequence[BlockHash], Sequence[memoryview]], int],
        arrive: Callable[[int], int],
        num_ready: int,
        end: Callable[[], None],
        forget: Callable[[], None],
        num_stored: int = 0,
        stored_in: str = DISK,
    ) -> None:
        super().__init__(arena, offsets, block_bytes, end, forget)
        self.ended = ended
        self.num_stored = num_stored
        self.stored_in = stored_in
        self._hashes = hashes
        self._pull = pull
        self._arrive = arrive
        self.num_ready_at_match = num_ready
        self._num_ready = num_ready if arena is not None else len(offsets)

    def wait(self, count: int | None = None) -> int:
        self._check()
        wanted = self.num_blocks if count is None else min(count, self.num_blocks)
        if wanted > self._num_ready:
            self._num_ready = max(self._num_ready, self._arrive(wanted))
            if self._num_ready < wanted:
                self.offsets = self.offsets[: self._num_ready]
                self.ended = MatchEnd.LOST
        return min(self._num_ready, self.num_blocks)

    def views(self, first: int = 0, count: int | None = None) -> list[memoryview]:
        self._check()
        end = self.num_blocks if count is None else min(first + count, self.num_blocks)
        end = min(end, self.wait(end))
        return self._open_views(first, max(0, end - first), readonly=True)

    def fetch(self, into: Sequence[Buffer], first: int = 0) -> int:
        self._check()
        count = max(0, min(len(into), self.num_blocks - first))
        buffers = byte_views(into[:count], self._block_bytes, writable=True)
        if self._arena is None:
            return self._pull(self._hashes[first : first + count], buffers)
        targets = [address_of(buffer) for buffer in buffers]
        position, last = first, first + count
        while position < last:
            # Blocks that have arrived are copied while the rest is in flight.
            end = min(self._num_ready, last) if self._num_ready > position else min(position + _WAIT_BLOCKS, last)
            end = min(end, self.wait(end))
            if end <= position:
                break
            with self._arena.in_use():
                sources = self._addresses()[position:end]
                copy_blocks(targets[position - first : end - first], sources, self._block_bytes)
            position = end
        return position - first

    def release(self) -> None:
        """End the lease; a second call does nothing. Raises `LeaseError`, and keeps it, while views are in use."""
        self._finish()


def weak_lease(
    hashes: Sequence[BlockHash],
    block_bytes: int,
    ended: MatchEnd,
    pull: Callable[[Sequence[BlockHash], Sequence[memoryview]], int],
) -> BlockLease:
    """A lease of a tier that cannot keep blocks for it: `pull` fetches those still present."""
    return BlockLease(
        None,
        range(len(hashes)),
        block_bytes,
        hashes,
        ended,
        pull,
        lambda count: count,
        len(hashes),
        lambda: None,
        lambda: None,
    )


class Reservation(_Scope):
    """Slots to write in place, in an arena of this host. Not thread-safe.

    Slot `i` is for the hash at `positions[i]` of the request; the other hashes are cached already (`num_ready`), being
    written by another client (`num_pending`) or found no room (`num_refused`). Slots that are uncommitted at `close`
    are given back.
    """

    def __init__(
        self,
        arena: MappedArena,
        offsets: Sequence[int],
        block_bytes: int,
        positions: Sequence[int],
        counts: tuple[int, int, int],
        commit: Callable[[int, int], int],
        end: Callable[[], None],
        forget: Callable[[], None],
    ) -> None:
        super().__init__(arena, offsets, block_bytes, end, forget)
        self.positions = positions
        self.num_ready, self.num_pending, self.num_refused = counts
        self._commit = commit

    def views(self) -> list[memoryview]:
        """Writable views of the slots, valid until `close`."""
        return self._open_views(0, self.num_blocks, readonly=False)

    def fill(self, blocks: Sequence[Buffer], first: int = 0, count: int | None = None) -> None:
        """Copy `blocks[i]` into slot `first + i`, for `count` slots (all that follow by default).

        Raises `ConfigError`, before a byte is copied, for blocks of another size.
        """
        self._check()
        assert self._arena is not None
        count = self.num_blocks - first if count is None else count
        if len(blocks) != count or first + count > self.num_blocks:
            raise ConfigError(f"{len(blocks)} blocks for {count} of {self.num_blocks} slots")
        sources = [address_of(view) for view in byte_views(blocks, self._block_bytes, writable=False)]
        with self._arena.in_use():
            for offset in self.offsets[first : first + count]:
                self._arena.populate(offset, self._block_bytes)
            copy_blocks(self._addresses()[first : first + count], sources, self._block_bytes)

    def commit(self, first: int = 0, count: int | None = None) -> int:
        """Make slots `first..first+count` (all by default) visible to all: they have their bytes. Returns how many."""
        self._check()
        return self._commit(first, self.num_blocks - first if count is None else count)

    def close(self) -> None:
        """Give back uncommitted slots; a second call does nothing. Raises `LeaseError` while views are in use."""
        self._finish()


class EmptyLease:
    """The lease of a match without blocks; `ended` says why."""

    num_blocks = 0
    num_ready_at_match = 0
    arena = None
    offsets = ()
    has_views = True

    def __init__(self, ended: MatchEnd, num_stored: int = 0, stored_in: str = DISK) -> None:
        self.ended = ended
        self.num_stored = num_stored
        self.stored_in = stored_in

    def wait(self, count: int | None = None) -> int:
        return 0

    def views(self, first: int = 0, count: int | None = None) -> list[memoryview]:
        return []

    def fetch(self, into: Sequence[Buffer], first: int = 0) -> int:
        return 0

    def release(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
