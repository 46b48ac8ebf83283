"""The host's time in a step, by part: counters around an engine's own methods, while a caller counts."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from kvtier.engine.device.runner import Submitted
from kvtier.engine.engine import Engine

_REST = "rest"


class StepParts:
    """Each part's own time, without the parts within it. One thread steps the engine."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._inner: list[float] = []
        self._num_steps = 0

    def milliseconds(self) -> dict[str, tuple[float, float]]:
        """Each part and the rest (`rest`) of a step: the average, and the 99th percentile of occurrences."""
        return {
            part: (1000 * sum(calls) / max(self._num_steps, 1), 1000 * sorted(calls)[len(calls) * 99 // 100])
            for part, calls in self._seconds.items()
        }

    @contextlib.contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        """Count the steps of `engine` meanwhile."""
        runner: Any = engine.runner
        own: Any = engine
        num_steps = engine.num_steps
        with contextlib.ExitStack() as stack:
            for owner, name, part in (
                (engine, "step", _REST),
                (engine.scheduler, "schedule", "schedule"),
                (engine.scheduler, "submitted", "schedule"),
                (runner, "_hidden_states", "forward: hand over"),
                (runner.model, "logits", "forward: hand over"),
                (Submitted, "_wait", "wait for tokens"),
                (own._constraints, "advance", "advance grammars"),
                (own._constraints, "masks", "masks"),
                (runner._mask_upload, "upload", "upload masks"),
                (runner._sampler, "sample", "sample: hand over"),
                (engine, "_look_at_oldest", "tokens and text"),
            ):
                stack.enter_context(self._counting(owner, name, part))
            yield
        self._num_steps += engine.num_steps - num_steps

    @contextlib.contextmanager
    def _counting(self, owner: Any, name: str, part: str) -> Iterator[None]:
        had = name in vars(owner)
        act = getattr(owner, name)
        setattr(owner, name, self._counted(act, part))
        try:
            yield
        finally:
            if had:
                setattr(owner, name, act)
            else:
                delattr(owner, name)

    def _counted(self, act: Callable[..., Any], part: str) -> Callable[..., Any]:
        seconds, inner = self._seconds, self._inner

        def counted(*args: Any, **named: Any) -> Any:
            inner.append(0.0)
            began_at = time.perf_counter()
            try:
                return act(*args, **named)
            finally:
                elapsed = time.perf_counter() - began_at
                seconds[part].append(elapsed - inner.pop())
                if inner:
                    inner[-1] += elapsed

        return counted
