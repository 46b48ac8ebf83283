"""How long the device takes for steps that compute prompts. Owned by the engine's thread."""

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
    """Call `start` before a step is handed over and `stop` after it; the device's times are noted later."""

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
        """Note the step, unless it waits for copies or computes next to nothing: then it says nothing about speed."""
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
    """Stands in without tiers: there is no decision to make from the speed, so no event is worth its launch."""

    def start(self) -> None:
        pass

    def stop(self, step: Step) -> None:
        pass
