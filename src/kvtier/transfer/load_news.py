"""Reports from the loading threads to a worker's thread: which loads have arrived, and which are over. No torch."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvtier.transfer.copier import Copies


@dataclass(frozen=True, slots=True)
class Loaded:
    """The bytes of a load that came from one tier, and how long that took. Picklable."""

    tier: str
    nbytes: int
    seconds: float


@dataclass(eq=False, slots=True)
class EndedLoad:
    """The first `num_loaded` of `num_blocks` are on the device once `arriving` is done; the others may hold anything.

    `parts` is complete when the load is over.
    """

    key: str
    num_blocks: int
    num_loaded: int = 0
    arriving: list[Copies] = field(default_factory=list)
    parts: list[Loaded] = field(default_factory=list)


class LoadNews:
    """Thread-safe. A load arrives before it is over, or at the same time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: list[EndedLoad] = []
        self._over: list[EndedLoad] = []
        self._arriving: set[EndedLoad] = set()

    def arrive(self, load: EndedLoad) -> None:
        """The last copies of the load were handed to the device."""
        with self._changed:
            self._arriving.add(load)
            self._arrived.append(load)
            self._changed.notify_all()

    def end(self, load: EndedLoad) -> None:
        """No more copies of the load are in flight."""
        with self._changed:
            if load not in self._arriving:
                self._arrived.append(load)
            self._arriving.discard(load)
            self._over.append(load)
            self._changed.notify_all()

    def wait_for_arrival(self, timeout_s: float) -> None:
        """Wait until a load that was not taken yet has arrived."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived, timeout_s)

    def wait_for_ends(self, timeout_s: float) -> None:
        """Wait until all loads that have arrived are over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._arriving, timeout_s)

    def take(self) -> tuple[list[EndedLoad], list[EndedLoad]]:
        """Loads that have arrived since the last call, and loads that are over."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
            over, self._over = self._over, []
        return arrived, over
