"""What a tier is: a place that may hold blocks and gives them back under a lease. Kept small: each kind is one file.

What else a tier can do, it says itself: callers ask for a capability, never for a kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.retention import Granted
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import Lease, Reservation
from kvtier.memory.mapped import MappedArena
from kvtier.tiers.explanation import Explanation
from kvtier.tiers.retention import RetentionAsk


class Tier(Protocol):
    """One level of cache for one namespace. Thread-safe.

    A miss is an answer, not an error. Where a call raises `TierError` or `CapacityError`, the tier is as it was before.
    """

    @property
    def name(self) -> str: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def answers_at_once(self) -> bool:
        """A match is a look into a dictionary of this process."""
        ...

    @property
    def is_local(self) -> bool:
        """A device can write the slots of `reserve`: they lie in memory of this host."""
        ...

    @property
    def arena(self) -> MappedArena | None:
        """The memory that holds all blocks of a local tier, if one does. Raises `TierUnavailable` without a server."""
        ...

    @property
    def staging(self) -> StagingTier | None:
        """The tier itself, if blocks of other tiers can pass through its memory."""
        ...

    @property
    def segmented(self) -> SegmentTier | None:
        """The tier itself, if it keeps whole segments of prompts and nothing less."""
        ...

    @property
    def generation(self) -> int:
        """How often its server has come back: what was offered before may be gone."""
        ...

    @property
    def holds_leases(self) -> bool:
        """What is leased is never evicted. Else a lease is weak: its `fetch` may bring fewer blocks than it has."""
        ...

    @property
    def keeps_notes(self) -> bool:
        """Explanations can be read back later: `note` does something."""
        ...

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """All hashes of a prompt so far, from its first block on: where a block stands may say where it is kept."""
        ...

    def announce(self, hashes: Sequence[BlockHash]) -> None:
        """These are being computed and will be offered: matches of other hosts end there as PENDING. Never waits."""
        ...

    def withdraw(self, hashes: Sequence[BlockHash]) -> None:
        """Those of `hashes` that were announced and not offered will not be. Never waits."""
        ...

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        """Lease the longest cached prefix of `hashes`."""
        ...

    def match_lazily(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        """As `match`, of what is in memory; the lease's `num_stored` counts what could be read from disk.

        A tier that cannot tell the two apart leases both.
        """
        ...

    def reserve(self, hashes: Sequence[BlockHash]) -> Reservation:
        """Slots of a local tier for the absent ones of `hashes`, which others wait for. Raises as `offer` does."""
        ...

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        """Take blocks in, as room and admission allow; returns how many were written.

        The caller's buffers are free when it returns. Raises `TierFull` when there was room for none.
        """
        ...

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]: ...

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        """Forget `hashes`, or everything; returns how many copies went. Leases keep their bytes until released."""
        ...

    def retain(self, hashes: Sequence[BlockHash], ask: RetentionAsk) -> Granted:
        """Keep a prompt's blocks, there or not, for a time, as far as the tier can: nothing if it cannot."""
        ...

    def note(self, explanation: Explanation) -> None:
        """Keep why a match ended, best effort."""
        ...

    def close(self) -> None: ...


class StagingTier(Tier, Protocol):
    """Memory of this process through which blocks pass between a device and tiers that are not local."""

    @property
    def arena(self) -> MappedArena: ...

    @property
    def num_blocks(self) -> int: ...

    def hold(self, hashes: Sequence[BlockHash]) -> Lease:
        """As `match`, for copies of blocks to another tier: nobody asked for them, so they were not used."""
        ...

    def stage(self, hashes: Sequence[BlockHash]) -> Reservation:
        """Slots for bytes of `hashes` on their way elsewhere. Raises `TierFull` without room for all."""
        ...


class SegmentTier(Tier, Protocol):
    """Keeps `segment_blocks` blocks of a prompt in a row, counted from its beginning, or none of them.

    So it is also offered blocks that were found and not computed, where a segment is not whole without them.
    """

    @property
    def segment_blocks(self) -> int: ...

    def has_segments(self, names: Sequence[BlockHash]) -> list[bool | None]:
        """Whether each segment, by its last block, is stored or being written; None if unknown. Never waits."""
        ...


class PlainTier(ABC):
    """The capabilities of a tier that claims none. Every kind inherits them and says where it can do more."""

    answers_at_once = False
    keeps_notes = False

    @property
    def holds_leases(self) -> bool:
        return True

    @property
    def is_local(self) -> bool:
        return False

    @property
    def arena(self) -> MappedArena | None:
        return None

    @property
    def staging(self) -> StagingTier | None:
        return None

    @property
    def segmented(self) -> SegmentTier | None:
        return None

    @property
    def generation(self) -> int:
        return 0

    def learn(self, hashes: Sequence[BlockHash]) -> None:  # noqa: B027  most tiers keep a block wherever it stands
        pass

    def announce(self, hashes: Sequence[BlockHash]) -> None:  # noqa: B027  a local tier has `reserve` for it
        pass

    def withdraw(self, hashes: Sequence[BlockHash]) -> None:  # noqa: B027
        pass

    @abstractmethod
    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease: ...

    def match_lazily(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        return self.match(hashes, timeout_s=timeout_s)

    def reserve(self, hashes: Sequence[BlockHash]) -> Reservation:
        raise AssertionError("only a local tier has slots to write in place")

    def retain(self, hashes: Sequence[BlockHash], ask: RetentionAsk) -> Granted:
        return Granted(0, 0.0)

    def note(self, explanation: Explanation) -> None:
        raise AssertionError("only a tier that keeps notes takes one")
