"""Places for values in the memory that is shared with the Mooncake process. Thread-safe."""

from __future__ import annotations

import threading
import time

_ALIGN = 64


class Slots:
    """As many places of `value_bytes` as `nbytes` hold. A taken place is exclusive until it is given back."""

    def __init__(self, nbytes: int, value_bytes: int) -> None:
        stride = -(-value_bytes // _ALIGN) * _ALIGN
        self.count = nbytes // stride
        self._free = [stride * number for number in reversed(range(self.count))]
        self._changed = threading.Condition(threading.Lock())

    @property
    def num_free(self) -> int:
        with self._changed:
            return len(self._free)

    def take(self, count: int, deadline: float) -> list[int]:
        """Offsets of up to `count` places; waits until at least one is free. Empty on timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._free, max(0.0, deadline - time.monotonic()))
            taken = self._free[-count:]
            del self._free[-count:]
            return taken[::-1]

    def give_back(self, offsets: list[int]) -> None:
        with self._changed:
            self._free += reversed(offsets)
            self._changed.notify_all()
