"""How much of what is cached to load, from measured speeds: what would be slower to load is computed.

For engines that compute behind what is loaded: a decision is where the load ends, before it has begun, after what is in
memory, or after what is on disk. One thread, the scheduler's. No torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kvtier.blocks.layout import KvLayout
from kvtier.tiers.speeds import Speeds

_RETRY_S = 10.0
"""What was slower than computing is tried again now and then: it may have become fast."""
_NUM_MATCH_TIMES = 5
_SLOWEST_BYTES_PER_S = 64e6
_GIVES_UP_AFTER = 1.5
"""A load that takes longer than this many times computing is given up."""


class LoadDecision:
    """For one engine. `chunk_tokens` is what it computes in a step at most."""

    def __init__(
        self,
        layout: KvLayout,
        chunk_tokens: int,
        *,
        memory_tier: str,
        disk_tier: str,
        always_loads: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.speeds = Speeds()
        self._block_tokens = layout.block_tokens
        self._block_bytes = layout.block_bytes
        self._chunk_tokens = chunk_tokens
        self._memory_tier = memory_tier
        self._disk_tier = disk_tier
        self._always_loads = always_loads
        self._clock = clock
        self._retried_at: dict[str, float] = {}
        self._match_times: deque[float] = deque(maxlen=_NUM_MATCH_TIMES)

    def end_of_load(self, first: int, memory_end: int, disk_end: int, num_tokens: int) -> int:
        """The block before which to stop loading, of a prompt whose blocks before `first` are there.

        Blocks up to `memory_end` are in the cache's memory, from there to `disk_end` on its disk.
        """
        memory_end, disk_end = max(first, memory_end), max(first, disk_end)
        ends = sorted({first, memory_end, disk_end})
        if self._always_loads or len(ends) == 1:
            return disk_end
        times = [self._total_s(first, memory_end, end, num_tokens) for end in ends]
        known = [seconds for seconds in times if seconds is not None]
        if len(known) < len(ends):
            return disk_end  # not measured yet: this measures it
        best = max(end for end, seconds in zip(ends, known, strict=True) if seconds <= min(known))
        if best < disk_end and self._may_retry("disk" if best >= memory_end else "memory"):
            return disk_end
        return best

    def timeout_s(self, first: int, end: int, num_tokens: int, least_s: float) -> float:
        """How long a load may take: not much longer than computing the same would, but never less than `least_s`."""
        compute_s = self._compute_s(first, num_tokens)
        rest_s = self._compute_s(end, num_tokens)
        if self._always_loads or compute_s is None or rest_s is None:
            return least_s + (end - first) * self._block_bytes / _SLOWEST_BYTES_PER_S
        return max(least_s, _GIVES_UP_AFTER * (compute_s - rest_s))

    def is_match_worth_it(self, num_tokens: int) -> bool:
        """Asking takes less than computing all of it."""
        compute_s = self._compute_s(0, num_tokens)
        times = sorted(self._match_times)
        if self._always_loads or compute_s is None or not times or times[len(times) // 2] < compute_s:
            return True
        return self._may_retry("matching")

    def note_match(self, seconds: float) -> None:
        self._match_times.append(seconds)

    def note_load(self, tier: str, nbytes: int, seconds: float) -> None:
        self.speeds.note_load(tier, nbytes, seconds)

    def _total_s(self, first: int, memory_end: int, end: int, num_tokens: int) -> float | None:
        """Until the prompt is computed when blocks `first..end` are loaded."""
        total = self._compute_s(end, num_tokens)
        for tier, count in ((self._memory_tier, min(end, memory_end) - first), (self._disk_tier, end - memory_end)):
            if count > 0:
                load_s = self.speeds.load_s(tier, count * self._block_bytes)
                if load_s is None or total is None:
                    return None
                total += load_s
        return total

    def _compute_s(self, first: int, num_tokens: int) -> float | None:
        start = first * self._block_tokens
        return self.speeds.prefill_s(start, max(0, num_tokens - start), self._chunk_tokens)

    def _may_retry(self, what: str) -> bool:
        now = self._clock()
        if now - self._retried_at.setdefault(what, now) < _RETRY_S:
            return False
        self._retried_at[what] = now
        return True
