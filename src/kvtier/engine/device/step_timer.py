"""How long the device takes for the steps that compute prompts. The engine's thread owns it."""

from __future__ import annotations

import time
from collections import deque

import torch

from kvtier.engine.schedule.step import Step
from kvtier.tiers.speeds import Speeds

_MIN_TOKENS = 16
_MAX_UNDER_WAY = 64

_Chunks = list[tuple[int, int]]


class StepTimer:
    """`start` before a step is handed over, `stop` after it; what the device has done is noted later."""

    def __init__(self, speeds: Speeds, device: torch.device) -> None:
        self._speeds = speeds
        self._is_cuda = device.type == "cuda"
        self._started_at = 0.0
        self._start: torch.cuda.Event | None = None
        self._under_way: deque[tuple[_Chunks, torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        if self._is_cuda:
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()
        self._started_at = time.perf_counter()

    def stop(self, step: Step) -> None:
        """Steps that wait for copies, or compute next to nothing, say nothing of the speed."""
        self._note_done()
        chunks = [(row.start, row.count) for row in step.rows]
        if step.arrivals or step.num_tokens < max(_MIN_TOKENS, 2 * len(step.rows)):
            return
        if self._start is None:
            self._speeds.note_prefill(chunks, time.perf_counter() - self._started_at)
        elif len(self._under_way) < _MAX_UNDER_WAY:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._under_way.append((chunks, self._start, end))

    def _note_done(self) -> None:
        while self._under_way and self._under_way[0][2].query():
            chunks, start, end = self._under_way.popleft()
            self._speeds.note_prefill(chunks, start.elapsed_time(end) / 1e3)


class NoStepTimer:
    """Without tiers there is no decision to be made from the speed, and no event is worth its launch."""

    def start(self) -> None:
        pass

    def stop(self, step: Step) -> None:
        pass
