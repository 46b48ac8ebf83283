"""The interface of a tier: a place that may have blocks and gives them back under a lease. Each kind is one small file.

A tier states its further capabilities itself: callers ask for a capability, never for a kind.
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
from kvtier.tiers.explaining import Asked
from kvtier.tiers.explanation import Explanation
from kvtier.tiers.retention import RetentionAsk


class Tier(Protocol):
    """One level of cache for one namespace. Thread-safe.

    A miss is an answer, not an error. If a call raises `TierError` or `CapacityError`, the tier is unchanged.
    """

    @property
    def name(self) -> str: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def answers_at_once(self) -> bool:
        """Whether a match is just a lookup in a dictionary of this process."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether a device can write the slots of `reserve`, because they are in memory of this host."""
        ...

    @property
    def arena(self) -> MappedArena | None:
        """The memory with all blocks of a local tier, if there is one. Raises `TierUnavailable` without a server."""
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
        """How often the tier's server has come back: blocks offered before may be gone."""
        ...

    @property
    def most_prompt_blocks(self) -> int | None:
        """The most leading blocks of one prompt that are worth storing; None if there is no such limit."""
        ...

    @property
    def holds_leases(self) -> bool:
        """Whether leased blocks are never evicted. Otherwise leases are weak: `fetch` may bring fewer blocks."""
        ...

    @property
    def keeps_notes(self) -> bool:
        """Whether explanations given to `note` can be read back later."""
        ...

    @property
    def asked(self) -> Asked | None:
        """Finds a prompt in other namespaces, if the tier can; its calls may wait for other processes."""
        ...

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """Learn all hashes of a prompt so far, from its first block on: a block's position may decide its place."""
        ...

    def announce(self, hashes: Sequence[BlockHash]) -> None:
        """Announce blocks that are being computed and will be offered: other hosts' matches end there as PENDING.
        Never waits.
        """
        ...

    def withdraw(self, hashes: Sequence[BlockHash]) -> None:
        """Withdraw the announcements of blocks that will not be offered after all. Never waits."""
        ...

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        """Lease the longest cached prefix of `hashes`."""
        ...

    def match_lazily(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        """Like `match`, but only for blocks in memory; the lease's `num_stored` counts those on disk behind them.

        A tier that cannot tell the two apart leases both.
        """
        ...

    def reserve(self, hashes: Sequence[BlockHash]) -> Reservation:
        """Slots of a local tier for the absent ones of `hashes`; other clients wait for them. Raises like `offer`."""
        ...

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        """Store blocks, as far as room and admission allow; returns how many were written.

        The caller's buffers are free when it returns. Raises `TierFull` if there was room for none.
        """
        ...

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]: ...

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        """Forget `hashes`, or everything; returns how many copies were dropped. Leased bytes stay until released."""
        ...

    def retain(self, hashes: Sequence[BlockHash], ask: RetentionAsk) -> Granted:
        """Retain a prompt's blocks, present or not, as far as the tier can."""
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
        """Like `match`, to copy blocks to another tier: this does not count as a use."""
        ...

    def stage(self, hashes: Sequence[BlockHash]) -> Reservation:
        """Slots for blocks on their way to another tier. Raises `TierFull` without room for all."""
        ...


class SegmentTier(Tier, Protocol):
    """Keeps whole segments of a prompt, `segment_blocks` consecutive blocks each, counted from its beginning.

    So blocks that were found rather than computed are offered as well, if they complete a segment.
    """

    @property
    def segment_blocks(self) -> int: ...

    def has_segments(self, names: Sequence[BlockHash]) -> list[bool | None]:
        """Whether each segment, by its last block, is stored or being written; None if unknown. Never waits."""
        ...


class PlainTier(ABC):
    """A tier without any further capability. Every kind inherits from it and overrides what it can do."""

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
    def asked(self) -> Asked | None:
        return None

    @property
    def generation(self) -> int:
        return 0

    @property
    def most_prompt_blocks(self) -> int | None:
        return None

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
