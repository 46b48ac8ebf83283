"""Durations of vLLM's steps, from when each was planned to when the workers finished it."""

from __future__ import annotations

import time
from collections import deque

from vllm.v1.core.sched.output import SchedulerOutput

from kvtier.tiers.speeds import Speeds

_MAX_STEPS_IN_FLIGHT = 64


class StepTimes:
    """Owned by the scheduler's thread. `number` is the last planned step."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self.number = 0
        # Of each step: its number, when it was planned, and `(tokens before, tokens)` of each request.
        self._steps: deque[tuple[int, float, list[tuple[int, int]]]] = deque(maxlen=_MAX_STEPS_IN_FLIGHT)
        self._stepped_at = 0.0

    def note_planned(self, output: SchedulerOutput) -> None:
        """Note what the last step computes of each request. Of decodes alone nothing is learned, and none is listed."""
        chunks: list[tuple[int, int]] = []
        counts = output.num_scheduled_tokens
        if output.total_num_scheduled_tokens > len(counts):
            cached = output.scheduled_cached_reqs
            chunks = [(new.num_computed_tokens, counts[new.req_id]) for new in output.scheduled_new_reqs]
            chunks += [
                (num_computed, counts[request_id])
                for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            ]
        self._steps.append((self.number, time.monotonic(), chunks))

    def note_done(self, number: int) -> None:
        """The workers have just finished this step."""
        now = time.monotonic()
        while self._steps and self._steps[0][0] <= number:
            of_step, began_at, chunks = self._steps.popleft()
            if of_step == number and chunks:
                self._speeds.note_prefill(chunks, now - max(began_at, self._stepped_at))
        self._stepped_at = now
