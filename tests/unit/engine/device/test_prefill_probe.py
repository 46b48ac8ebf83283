"""Which steps measure the speed of prefill at start-up, with a runner whose steps take as long as the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from kvtier.engine.config import EngineConfig
from kvtier.engine.device.prefill_probe import measure_prefill
from kvtier.engine.device.runner import Runner
from kvtier.engine.device.step_timer import StepTimer
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.step import Step


class _Runner:
    def __init__(self, step_s: Callable[[int, int], float]) -> None:
        """`step_s` is asked with a step's tokens and how many steps came before."""
        self.now = 0.0
        self.sizes: list[int] = []
        self._step_s = step_s

    def submit(self, step: Step) -> _Runner:
        [row] = step.rows
        self.now += self._step_s(row.count, len(self.sizes))
        self.sizes.append(row.count)
        return self

    def wait(self) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


class _Timer:
    def __init__(self) -> None:
        self.measured: list[int] = []

    def start(self) -> None:
        pass

    def stop(self, step: Step) -> None:
        self.measured.append(step.rows[0].count)


def _measured(step_s: Callable[[int, int], float]) -> list[int]:
    runner, timer = _Runner(step_s), _Timer()
    config = EngineConfig(model="probed", max_num_batched_tokens=1024)
    measure_prefill(cast(Runner, runner), cast(StepTimer, timer), config, 2048, clock=lambda: runner.now)
    return timer.measured


def test_a_slow_device_is_not_kept_from_starting_by_larger_steps() -> None:
    assert _measured(lambda count, _: count * 1e-3) == [32, 32, 256, 256]


def test_one_step_that_was_held_up_does_not_end_the_measurement() -> None:
    held_up = 1
    assert _measured(lambda count, number: 0.5 if number == held_up else count * 1e-5)[:6] == [
        32,
        32,
        256,
        256,
        1024,
        1024,
    ]
