"""Durations of vLLM's steps, from when each was planned to when the workers finished it."""

from __future__ import annotations

import time
from collections import deque

from kvtier.tiers.speeds import Speeds

_MAX_STEPS_IN_FLIGHT = 64


class StepTimes:
    """Owned by the scheduler's thread. `number` is the last planned step."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self.number = 0
        self._steps: deque[tuple[int, float, list[tuple[int, int]]]] = deque(maxlen=_MAX_STEPS_IN_FLIGHT)
        self._stepped_at = 0.0

    def note_planned(self, chunks: list[tuple[int, int]]) -> None:
        """The last step computes `(tokens before, tokens)` of each request."""
        self._steps.append((self.number, time.monotonic(), chunks))

    def note_done(self, number: int) -> None:
        """The workers have just finished this step."""
        now = time.monotonic()
        while self._steps and self._steps[0][0] <= number:
            of_step, began_at, chunks = self._steps.popleft()
            if of_step == number and any(count > 1 for _, count in chunks):
                self._speeds.note_prefill(chunks, now - max(began_at, self._stepped_at))
        self._stepped_at = now
