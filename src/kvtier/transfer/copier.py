"""Moves blocks between a device's KV memory and memory of this host: the interface.

Loads and stores are begun by the tiers' threads and run beside compute. What orders them with the steps is a *mark*: a
point in the device's work, taken by the engine's thread, after which a copy may begin. Where a block lies on the device
is said by its *places* (see `places`); in an arena a block has one place, which is its block id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier.memory.mapped import MappedArena


class Mark(Protocol):
    """A point in the device's work."""

    def query(self) -> bool:
        """The device is past it."""
        ...


class Arrival(Protocol):
    """Something whose layers come one after the other."""

    def precede(self, layer: int) -> None:
        """What the engine's thread hands to the device from now on runs after `layer` of every block has arrived."""
        ...


class Copies(Arrival, Protocol):
    """Copies that were begun."""

    @property
    def is_done(self) -> bool: ...

    @property
    def num_bytes_left(self) -> int:
        """No more than these have still to come."""
        ...

    def wait(self) -> None:
        """Until they are done. Other threads run meanwhile. Raises `TierUnavailable` when the device fails."""
        ...


class Copier(Protocol):
    """Thread-safe for different places, but for `mark`, which is the engine's thread's.

    A copy that cannot be begun raises `LeaseError` when the arena is closed, and `TierUnavailable` when the copier is
    or the device fails.
    """

    @property
    def is_whole(self) -> bool:
        """The device has every head of a block."""
        ...

    def mark(self) -> Mark:
        """After all that was handed to the device so far."""
        ...

    def load(self, arena: MappedArena, offsets: Sequence[int], places: Sequence[int], after: Mark) -> Copies:
        """Begin to copy the blocks at `offsets` of `arena` to the device: each block's places follow in `places`."""
        ...

    def store(self, places: Sequence[int], arena: MappedArena, offsets: Sequence[int], after: Mark) -> Copies:
        """Begin to copy the other way. The arena keeps what it holds of heads that the device does not have."""
        ...

    def adopt(self, arena: MappedArena) -> None:
        """This arena is going to be copied from and to: make that fast, in the background. A second call is free."""
        ...

    def close(self) -> None:
        """Wait for all copies, and let go of arenas. Closed before the arenas that it adopted."""
        ...
