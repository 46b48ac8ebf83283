"""A virtual clock, and links whose bandwidth is shared evenly by the flows on them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

Act: TypeAlias = Callable[[], None]

_TINY = 1e-9
"""A flow with less than this share of its bytes left is over: sums of floats do not meet exactly."""


class Clock:
    """Runs acts at their virtual times, those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._acts: list[tuple[float, int, Act]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, act: Act) -> None:
        heapq.heappush(self._acts, (max(time_s, self.now), next(self._numbers), act))

    def after(self, delay_s: float, act: Act) -> None:
        self.at(self.now + delay_s, act)

    def run(self, until_s: float = float("inf")) -> None:
        """Run until nothing is left to do, or until the clock shows `until_s`."""
        while self._acts and self._acts[0][0] <= until_s:
            self.now, _, act = heapq.heappop(self._acts)
            act()
        if until_s < float("inf"):
            self.now = max(self.now, until_s)


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way over a link. `ends_at` is how much every flow since the link's beginning had when it ends."""

    nbytes: float
    ends_at: float
    on_end: Act
    is_over: bool = field(default=False)


class Link:
    """`rate` bytes per second, shared evenly by its flows, none of which is faster than `flow_rate`.

    That is max-min fairness where each host has one flow at a time: its own network is the limit of the flow.
    """

    def __init__(self, clock: Clock, rate: float, flow_rate: float) -> None:
        self._clock = clock
        self._rate = rate
        self._flow_rate = flow_rate
        self._served = 0.0
        self._noted_at = clock.now
        self._heap: list[tuple[float, int, Flow]] = []
        self._numbers = itertools.count()
        self._num_flows = 0
        self._version = 0
        self.delivered_bytes = 0.0
        self.busy_s = 0.0

    @property
    def num_flows(self) -> int:
        return self._num_flows

    def start(self, nbytes: float, on_end: Act) -> Flow:
        self._advance()
        flow = Flow(nbytes, self._served + nbytes, on_end)
        heapq.heappush(self._heap, (flow.ends_at, next(self._numbers), flow))
        self._num_flows += 1
        self._plan()
        return flow

    def cancel(self, flow: Flow) -> float:
        """End a flow early. Returns the bytes that had arrived."""
        if flow.is_over:
            return flow.nbytes
        self._advance()
        flow.is_over = True
        self._num_flows -= 1
        self._plan()
        return max(0.0, flow.nbytes - (flow.ends_at - self._served))

    def cut(self) -> list[Flow]:
        """End all flows early, without calling their `on_end`."""
        self._advance()
        flows = [flow for _, _, flow in self._heap if not flow.is_over]
        for flow in flows:
            flow.is_over = True
        self._heap.clear()
        self._num_flows = 0
        self._plan()
        return flows

    def came_bytes(self, flow: Flow) -> float:
        """The bytes of an unfinished flow that have arrived."""
        self._advance()
        return max(0.0, flow.nbytes - (flow.ends_at - self._served))

    def set_rate(self, rate: float) -> None:
        self._advance()
        self._rate = rate
        self._plan()

    @property
    def each_rate(self) -> float:
        """The bytes that each flow has now."""
        return min(self._flow_rate, self._rate / self._num_flows) if self._num_flows else 0.0

    def _advance(self) -> None:
        """Account for the bytes since the last change."""
        elapsed_s = self._clock.now - self._noted_at
        self._noted_at = self._clock.now
        if self._num_flows:
            each = self.each_rate * elapsed_s
            self._served += each
            self.delivered_bytes += each * self._num_flows
            self.busy_s += elapsed_s

    def _plan(self) -> None:
        """Look again when the next flow ends, unless something changes before."""
        self._version += 1
        while self._heap and self._heap[0][2].is_over:
            heapq.heappop(self._heap)
        if self._heap:
            version = self._version
            left = max(0.0, self._heap[0][0] - self._served)
            self._clock.after(left / self.each_rate, lambda: self._end_due(version))

    def _end_due(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        due: list[Flow] = []
        while self._heap and self._heap[0][0] - self._served <= _TINY * max(self._heap[0][2].nbytes, self._served):
            flow = heapq.heappop(self._heap)[2]
            if not flow.is_over:
                flow.is_over = True
                self._num_flows -= 1
                due.append(flow)
        self._plan()
        for flow in due:
            flow.on_end()
