"""Keeps tokens on time in a process whose other threads have work to do. No torch.

Only one thread at a time holds the GIL: a thread that finds it taken, even for microseconds, sleeps and is woken a
fifth of a millisecond later. The engine's thread cannot avoid that, but the other threads can. The engine's thread
notes when it hands out tokens, which shows when the next are due; the tiers' threads begin nothing just before that.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

_MARGIN_S = 0.00045
"""Longer than most single actions of the tiers' threads."""
_HANDING_OUT_S = 0.0002

_MARGIN_SHARE = 1 / 8
_HANDING_OUT_SHARE = 1 / 16
"""In short steps, the margins are at most these shares of a step: loads have to make progress, too."""

_MAX_STEP_S = 0.02
"""In longer steps, a fraction of a millisecond does not matter."""

_NUM_TIMES = 6
_NUM_LAST = 4


class LatencyGuard:
    """One per engine. Its thread notes times, other threads call `let_pass`."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._quiet = (0.0, 0.0)
        """The interval in which nothing should begin. Always replaced as a whole: any thread reads it."""

    def note_handed_out(self) -> None:
        """Tokens were handed out: the next are expected after the median interval.

        Some may have been late, so the earliest of the last few predictions counts.
        """
        times = self._times
        times.append(self._clock())
        if len(times) < _NUM_TIMES:
            return
        steps_s = sorted(later - earlier for earlier, later in itertools.pairwise(times))
        step_s = steps_s[len(steps_s) // 2]
        if step_s > _MAX_STEP_S:
            self._quiet = (0.0, 0.0)
            return
        due_at = min(times[-back] + back * step_s for back in range(1, _NUM_LAST + 1))
        self._quiet = (
            due_at - min(_MARGIN_S, _MARGIN_SHARE * step_s),
            due_at + min(_HANDING_OUT_S, _HANDING_OUT_SHARE * step_s),
        )

    def let_pass(self) -> None:
        """From any other thread: if tokens are due, wait until they should be out."""
        start, end = self._quiet
        now = self._clock()
        if start <= now < end:
            self._sleep(end - now)


_of_thread = threading.local()


def yield_to(let_pass: Callable[[], None] | None) -> None:
    """From now on, the calling thread calls `let_pass`, which may wait a moment, whenever it can `give_way`."""
    _of_thread.let_pass = let_pass


def current_guard() -> Callable[[], None] | None:
    """The calling thread's `let_pass`, for the threads that work for it."""
    let_pass: Callable[[], None] | None = getattr(_of_thread, "let_pass", None)
    return let_pass


def give_way() -> None:
    """Call after waiting, or before computing. The caller must hold no lock that others need."""
    let_pass = current_guard()
    if let_pass is not None:
        let_pass()
