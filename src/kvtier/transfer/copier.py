"""The interface for moving blocks between a device's KV memory and host memory.

The tiers' threads begin loads and stores, which run beside compute. A *mark* orders them with the steps: the engine's
thread takes it at a point in the device's work, and a copy may begin after that point. A block's *places* (see
`places`) say where it lies on the device; in an arena, a block has one place, its block id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier.memory.mapped import MappedArena


class Mark(Protocol):
    """A point in the device's work."""

    def query(self) -> bool:
        """Whether the device is past it."""
        ...


class Arrival(Protocol):
    """A load whose layers arrive one after another."""

    def precede(self, layer: int) -> None:
        """Make work given to the device from now on run after `layer` of every block has arrived."""
        ...


class Copies(Arrival, Protocol):
    """Copies in progress."""

    @property
    def is_done(self) -> bool: ...

    @property
    def num_bytes_left(self) -> int:
        """Upper bound on the bytes that have not arrived yet."""
        ...

    def wait(self) -> None:
        """Wait for the copies, without the GIL. Raises `TierUnavailable` if the device fails."""
        ...


class Copier(Protocol):
    """Thread-safe for different places, except `mark`, which belongs to the engine's thread.

    If a copy cannot begin, raises `LeaseError` if the arena is closed, and `TierUnavailable` if the copier is closed or
    the device has failed.
    """

    @property
    def is_whole(self) -> bool:
        """Whether the device holds every head of a block."""
        ...

    def mark(self) -> Mark:
        """A mark behind everything handed to the device so far."""
        ...

    def load(self, arena: MappedArena, offsets: Sequence[int], places: Sequence[int], after: Mark) -> Copies:
        """Begin to copy the blocks at `offsets` of `arena` to the device: `places` lists the places of each in turn."""
        ...

    def store(self, places: Sequence[int], arena: MappedArena, offsets: Sequence[int], after: Mark) -> Copies:
        """Begin to copy the other way. Heads that the device does not have stay unchanged in the arena."""
        ...

    def adopt(self, arena: MappedArena) -> None:
        """Prepare this arena for fast copies, in the background. Repeated calls are free."""
        ...

    def close(self) -> None:
        """Wait for all copies and release the arenas. Must be called before the adopted arenas are closed."""
        ...
