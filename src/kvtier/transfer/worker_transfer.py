"""Loads and stores of a process that is told which blocks to bring where, by a scheduler that has matched. No torch.

One thread, the worker's, calls everything here and never waits, but for `drop` and the end. What it says of a load or a
store is a *key*: the scheduler's name for a prompt. Blocks of the device are given by their places (`places`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from kvtier.blocks.hashing import BlockHash
from kvtier.errors import TierError
from kvtier.observe.log_limit import LogLimit
from kvtier.tiers.hierarchy import Hierarchy, Segment
from kvtier.tiers.tier import Tier
from kvtier.transfer.copier import Copier, Mark
from kvtier.transfer.device_lease import DeviceLease
from kvtier.transfer.load import Load, LoadPlan, Order, Span
from kvtier.transfer.loader import Loader
from kvtier.transfer.matching import spans_of
from kvtier.transfer.shared_stores import ShareWriter, Slots
from kvtier.transfer.small_pages import SmallPageCopier, packed
from kvtier.transfer.step_marks import StepMarks
from kvtier.transfer.storer import Storer
from kvtier.transfer.worker_threads import WorkerThreads

logger = logging.getLogger(__name__)

_NUM_LOADERS = 2
_UNIT_BYTES = 16 << 20
"""Blocks that come from disk or over TCP are copied as soon as so many have arrived."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many bytes of a load came from a tier, and how long that took. Picklable."""

    tier: str
    nbytes: int
    seconds: float


@dataclass(slots=True)
class EndedLoad:
    """The first `num_loaded` of `num_blocks` are on the device; the others may hold anything."""

    key: str
    num_blocks: int
    num_loaded: int = 0
    parts: list[Loaded] = field(default_factory=list)


class WorkerTransfer:
    """Between one device and one tier. Owns the tier and the copier."""

    def __init__(
        self,
        tier: Tier,
        copier: Copier,
        *,
        batch_bytes: int,
        parts_per_block: int = 1,
        shares: ShareWriter | None = None,
    ) -> None:
        """About `batch_bytes` are stored together. `shares` is for a device that has not all heads of a block."""
        self._tier = tier
        self._parts_per_block = parts_per_block
        self._copier = copier if parts_per_block == 1 else SmallPageCopier(copier, parts_per_block)
        self._hierarchy = Hierarchy([tier], failure="blocks are not kept: %(error)s")
        self._shares = shares
        self._batch_blocks = max(1, batch_bytes // tier.layout.slot_bytes)
        self._num_unsent = 0
        self._marks = StepMarks(self._copier)
        self._ended: deque[EndedLoad] = deque()
        self._log = LogLimit(logger)
        with contextlib.suppress(TierError):  # a server that is away is adopted later
            if tier.arena is not None:
                self._copier.adopt(tier.arena)
        self._loader = Loader(self._hierarchy, self._copier, _nothing)
        self._storer = Storer(self._hierarchy, self._copier, self._marks, _nothing)
        self._threads = WorkerThreads(_NUM_LOADERS, "kvtier-load")

    # --- the worker's thread ------------------------------------------------------------------------------------------

    def note_step(self) -> None:
        """What is begun from now on comes after all that was handed to the device so far."""
        self._marks.note_step()

    def load(self, key: str, hashes: Sequence[BlockHash], places: Sequence[int], timeout_s: float) -> None:
        """Bring these blocks, from the first on, until one is missing or the time is up."""
        ids = packed(places, self._parts_per_block)
        load = functools.partial(self._load, EndedLoad(key, len(ids)), hashes, ids, self._marks.last, timeout_s)
        self._threads.submit(load)

    def take_loads(self) -> list[EndedLoad]:
        """Loads that are over."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def store(self, key: str, hashes: Sequence[BlockHash], places: Sequence[int]) -> None:
        """Keep these blocks, once the device is past the last step; after `send`."""
        ids = list(packed(places, self._parts_per_block))
        for first in range(0, len(ids), self._batch_blocks):
            some = ids[first : first + self._batch_blocks]
            if self._num_unsent + len(some) > self._batch_blocks:
                self.send()
            self._num_unsent += len(some)
            self._storer.offer(hashes[first : first + self._batch_blocks], DeviceLease(some, []), key)

    def send(self) -> None:
        """Begin the stores."""
        self._num_unsent = 0
        self._storer.send(is_last=True)

    def write_share(self, key: str, places: Sequence[int], slots: Slots) -> None:
        """Write what the device has of these blocks into slots that are reserved for them."""
        assert self._shares is not None
        self._shares.write(key, places, slots, self._marks.last)

    def take_shares(self) -> list[tuple[Slots, bool]]:
        """Shares that are over, and whether each was written."""
        return [] if self._shares is None else self._shares.take_ended()

    def drop(self, keys: Set[str]) -> None:
        """Their blocks are given away: return when none of them is being copied to a tier, or will be."""
        self._storer.drop(keys)
        if self._shares is not None:
            self._shares.drop(keys)

    def storing(self) -> set[object]:
        """The keys whose blocks are still needed for stores."""
        self._storer.take_copied()
        return self._storer.owners() | (set() if self._shares is None else self._shares.keys())

    @property
    def num_stored(self) -> int:
        """Blocks that the tier has taken, without shares."""
        return self._storer.num_stored

    @property
    def num_refused(self) -> int:
        """Blocks that the tier did not take."""
        return self._storer.num_refused + (0 if self._shares is None else self._shares.num_refused)

    def close(self) -> None:
        """Finish the stores and loads that are under way."""
        self._threads.close()
        self._storer.close()
        if self._shares is not None:
            self._shares.close()
        self._copier.close()
        self._hierarchy.close()

    # --- the loading threads ------------------------------------------------------------------------------------------

    def _load(
        self, ended: EndedLoad, hashes: Sequence[BlockHash], ids: Sequence[int], after: Mark, timeout_s: float
    ) -> None:
        try:
            self._bring(ended, hashes, ids, after, timeout_s)
        except TierError as error:
            self._log.warning("load", "a load failed and is computed instead: %s", error)
        except Exception:
            logger.exception("a load failed and is computed instead")
        finally:
            self._ended.append(ended)

    def _bring(
        self, ended: EndedLoad, hashes: Sequence[BlockHash], ids: Sequence[int], after: Mark, timeout_s: float
    ) -> None:
        started_at = time.monotonic()
        deadline = started_at + timeout_s
        layout = self._tier.layout
        with self._tier.match(hashes, timeout_s=timeout_s) as lease:
            spans = spans_of([Segment(self._tier.name, 0, lease)], 0)
            if not lease.has_views:  # how its server has them makes no difference
                spans = [Span(self._tier.name, self._tier.name, 0, lease.num_blocks, lease, 0)]
            for span in spans:
                load = _TimedLoad(span, hashes, ids, max(1, _UNIT_BYTES // layout.slot_bytes), after, deadline)
                self._loader.bring(load)
                now = time.monotonic()
                if load.num_arrived:
                    ended.parts.append(Loaded(span.tier, load.num_arrived * layout.block_bytes, now - started_at))
                ended.num_loaded += load.num_arrived
                started_at = now
                if load.num_arrived < load.num_blocks:
                    return


class _TimedLoad(Load):
    """All of a span, from the front, unless the deadline comes before."""

    def __init__(
        self,
        span: Span,
        hashes: Sequence[BlockHash],
        ids: Sequence[int],
        unit: int,
        after: Mark,
        deadline: float,
    ) -> None:
        plan = LoadPlan(span, span.first, span.end, Order.FRONT, None, unit)
        super().__init__(plan, hashes[span.first : span.end], ids[span.first : span.end], after, time.monotonic())
        self._deadline = deadline

    def take(self, count: int) -> tuple[int, int]:
        return (0, 0) if time.monotonic() >= self._deadline else super().take(count)


def _nothing() -> None:
    pass
