"""Scopes over blocks in an arena: leases to read, reservations to write. Both are context managers.

Where the blocks lie in memory of this process, views cost no copy. A view must not be used after its lease: it is
released with it, and a lease whose views are still exported (to numpy, say) refuses to end. Wrong bytes are worse
than an exception.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from kvtier.blocks.hashing import BlockHash
from kvtier.errors import LeaseError
from kvtier.memory.copying import Buffer, address_of, byte_views, copy_blocks
from kvtier.memory.mapped import MappedArena

logger = logging.getLogger(__name__)

_Export: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"

_IN_USE = "views of these blocks are still in use, by an array or another view: drop those first"


def _references(exports: Sequence[_Export], position: int) -> int:
    return sys.getrefcount(exports[position])


_NO_REFERENCES = _references([(ctypes.c_ubyte * 1)()], 0)


class Lease(Protocol):
    """The longest cached prefix of what was asked, safe from eviction until `release`.

    `ended` says what the next block was: "all" there were no more, "miss", "pending" (being written), "limit" (this
    client holds as much as it may), "down" (the tier did not answer).
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def ended(self) -> str: ...

    @property
    def has_views(self) -> bool:
        """The blocks lie in memory of this process: `views` costs no copy."""
        ...

    def views(self) -> list[memoryview]:
        """Read-only views of the blocks, valid until `release`. Raises `LeaseError` where there are none."""
        ...

    def fetch(self, into: Sequence[Buffer]) -> int:
        """Copy the leading blocks into the caller's buffers. Returns how many arrived: fewer if the tier fails."""
        ...

    def release(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Scope:
    """The shared half of leases and reservations: views over an arena, one end.

    `forget` stands in for `end` when the collector finds a scope that nobody ended: it must not block or lock.
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
        self._views: list[memoryview] | None = None
        self._exports: list[_Export] = []
        self._is_over = False

    @property
    def num_blocks(self) -> int:
        return len(self.offsets)

    @property
    def has_views(self) -> bool:
        return self._arena is not None

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
        """Nobody ended it: end it late, unless its views live on; then only the process's end gives it back."""
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

    def _open_views(self, *, readonly: bool) -> list[memoryview]:
        self._check()
        if self._arena is None:
            raise LeaseError("these blocks are in no memory of this process and have no views: fetch them")
        if self._views is None:
            arena, nbytes = self._arena, self._block_bytes
            self._exports = [arena.export(offset, nbytes) for offset in self.offsets]
            views = [memoryview(export).cast("B") for export in self._exports]
            self._views = [view.toreadonly() for view in views] if readonly else views
        return self._views

    def _check(self) -> None:
        if self._is_over:
            raise LeaseError("this lease or reservation has ended")

    def _end_views(self) -> None:
        try:
            for view in self._views or ():
                view.release()
        except BufferError as error:
            raise LeaseError(_IN_USE) from error
        # A view made from one of ours survives its release, but keeps the export alive.
        if any(_references(self._exports, position) > _NO_REFERENCES for position in range(len(self._exports))):
            raise LeaseError(_IN_USE)
        self._views = None
        self._exports = []

    def _addresses(self) -> list[int]:
        assert self._arena is not None
        base = self._arena.address
        return [base + offset for offset in self.offsets]


class BlockLease(_Scope):
    """A lease of one tier. Not thread-safe. `offsets` are places in `arena`; without one, `pull` brings the bytes."""

    def __init__(
        self,
        arena: MappedArena | None,
        offsets: Sequence[int],
        block_bytes: int,
        hashes: Sequence[BlockHash],
        ended: str,
        pull: Callable[[Sequence[BlockHash], Sequence[memoryview]], int],
        end: Callable[[], None],
        forget: Callable[[], None],
    ) -> None:
        super().__init__(arena, offsets, block_bytes, end, forget)
        self.ended = ended
        self._hashes = hashes
        self._pull = pull

    def views(self) -> list[memoryview]:
        return self._open_views(readonly=True)

    def fetch(self, into: Sequence[Buffer]) -> int:
        self._check()
        count = min(len(into), self.num_blocks)
        buffers = byte_views(into[:count], self._block_bytes, writable=True)
        if self._arena is None:
            return self._pull(self._hashes[:count], buffers)
        copy_blocks([address_of(buffer) for buffer in buffers], self._addresses(), self._block_bytes)
        return count

    def release(self) -> None:
        """End the lease; a second call does nothing. Raises `LeaseError` while views are in use, and holds on then."""
        self._finish()


class Reservation(_Scope):
    """Slots to write in place, in an arena of this host. Not thread-safe.

    Slot `i` is for the hash at `positions[i]` of what was asked for; the others are cached already (`num_ready`),
    being written by somebody else (`num_pending`) or found no room (`num_refused`). What is not committed when it is
    closed is given back.
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
        return self._open_views(readonly=False)

    def fill(self, blocks: Sequence[memoryview]) -> None:
        """Copy `blocks[i]` into slot `i`."""
        self._check()
        assert self._arena is not None
        for offset in self.offsets:
            self._arena.populate(offset, self._block_bytes)
        copy_blocks(self._addresses(), [address_of(block) for block in blocks], self._block_bytes)

    def commit(self, first: int = 0, count: int | None = None) -> int:
        """Slots `first..first+count` (all by default) hold their bytes: show them to everyone. Returns how many."""
        self._check()
        return self._commit(first, self.num_blocks - first if count is None else count)

    def close(self) -> None:
        """Give back what was not committed; a second call does nothing. Raises `LeaseError` while views are in use."""
        self._finish()


class EmptyLease:
    """Nothing matched, and why."""

    num_blocks = 0
    has_views = True

    def __init__(self, ended: str) -> None:
        self.ended = ended

    def views(self) -> list[memoryview]:
        return []

    def fetch(self, into: Sequence[Buffer]) -> int:
        return 0

    def release(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
