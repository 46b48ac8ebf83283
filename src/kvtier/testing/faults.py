"""Tiers that fail on purpose, around a real one. The only source of faults in tests: nothing is patched."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.retention import Granted
from kvtier.errors import TierError, TierUnavailable
from kvtier.memory.copying import Buffer, byte_views
from kvtier.memory.lease import Lease
from kvtier.tiers.retention import RetentionAsk
from kvtier.tiers.tier import PlainTier, Tier


class WrappedTier(PlainTier):
    """Passes all calls on, but no capabilities; subclasses override the calls that they break."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def layout(self) -> KvLayout:
        return self.inner.layout

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        return self.inner.match(hashes, timeout_s=timeout_s)

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        return self.inner.offer(hashes, blocks)

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return self.inner.contains(hashes)

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        return self.inner.drop(hashes)

    def retain(self, hashes: Sequence[BlockHash], ask: RetentionAsk) -> Granted:
        return self.inner.retain(hashes, ask)

    def close(self) -> None:
        self.inner.close()


class FailingTier(WrappedTier):
    """Raises `error()` in every call while `is_failing`."""

    def __init__(self, inner: Tier, error: Callable[[], Exception] = lambda: TierUnavailable("injected")) -> None:
        super().__init__(inner)
        self.is_failing = True
        self.num_calls = 0
        self._error = error

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        self._fail()
        return super().match(hashes, timeout_s=timeout_s)

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        self._fail()
        return super().offer(hashes, blocks)

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        self._fail()
        return super().contains(hashes)

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        self._fail()
        return super().drop(hashes)

    def _fail(self) -> None:
        self.num_calls += 1
        if self.is_failing:
            raise self._error()


class SlowTier(WrappedTier):
    """Waits before every match and offer."""

    def __init__(self, inner: Tier, delay_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner)
        self._delay_s = delay_s
        self._sleep = sleep

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        self._sleep(self._delay_s)
        return super().match(hashes, timeout_s=timeout_s)

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        self._sleep(self._delay_s)
        return super().offer(hashes, blocks)


class TruncatingTier(WrappedTier):
    """Matches in full, but delivers only `num_blocks` blocks, and raises `error` if given."""

    def __init__(self, inner: Tier, num_blocks: int, error: TierError | None = None) -> None:
        super().__init__(inner)
        self._num_blocks = num_blocks
        self._error = error

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        return _TruncatedLease(super().match(hashes, timeout_s=timeout_s), self._num_blocks, self._error)


class CorruptingTier(WrappedTier):
    """Flips one bit in the first byte of every block it delivers."""

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        return _CorruptedLease(super().match(hashes, timeout_s=timeout_s))


class _WrappedLease:
    arena = None
    offsets = ()
    has_views = False

    def __init__(self, inner: Lease) -> None:
        self._inner = inner
        self.num_blocks = self.num_ready_at_match = inner.num_blocks
        self.num_stored = inner.num_stored
        self.stored_in = inner.stored_in
        self.ended = inner.ended

    def wait(self, count: int | None = None) -> int:
        return self._inner.wait(count)

    def views(self, first: int = 0, count: int | None = None) -> list[memoryview]:
        return self._inner.views(first, count)

    def fetch(self, into: Sequence[Buffer], first: int = 0) -> int:
        return self._inner.fetch(into, first)

    def release(self) -> None:
        self._inner.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _TruncatedLease(_WrappedLease):
    def __init__(self, inner: Lease, num_blocks: int, error: TierError | None) -> None:
        super().__init__(inner)
        self._num_delivered = num_blocks
        self._error = error

    def fetch(self, into: Sequence[Buffer], first: int = 0) -> int:
        arrived = super().fetch(into[: max(0, self._num_delivered - first)], first)
        if self._error is not None:
            raise self._error
        return arrived


class _CorruptedLease(_WrappedLease):
    def fetch(self, into: Sequence[Buffer], first: int = 0) -> int:
        arrived = super().fetch(into, first)
        for buffer in into[:arrived]:
            (view,) = byte_views([buffer], memoryview(buffer).nbytes, writable=True)
            view[0] ^= 1
        return arrived
