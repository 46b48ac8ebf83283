"""An engine over a simulated device and simulated tiers: see `tiered_device` and `simulated_traffic`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import cast

from kvtier.engine.schedule.block_manager import BlockManagerName
from kvtier.engine.schedule.scheduler import Scheduler
from kvtier.engine.schedule.step import Step
from kvtier.transfer.traffic import Traffic
from kvtier.transfer.transfer import Transfer
from tests.support.engine_building import SimulatedEngine
from tests.support.simulated_traffic import SimulatedTraffic
from tests.support.tiered_device import TieredDevice


class TieredEngine(SimulatedEngine):
    """A `SimulatedEngine` with tiers. Time stands still but for `now`."""

    def __init__(
        self,
        manager: BlockManagerName = "prefix_caching",
        *,
        chance: Random | None = None,
        num_blocks: int = 64,
        block_tokens: int = 4,
        chunk: int = 1 << 20,
        num_steps_ahead: int = 0,
        max_num_requests: int = 16,
        piece_blocks: int = 256,
    ) -> None:
        super().__init__(
            manager,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            chunk=chunk,
            num_steps_ahead=num_steps_ahead,
            max_num_requests=max_num_requests,
        )
        self.now = 0.0
        self._num_idle_steps = 0
        self.tiered_device = self.device = TieredDevice(block_tokens, max_num_requests)
        chance = Random(0) if chance is None else chance
        self.traffic = SimulatedTraffic(self.tiered_device, self.requests, chance)
        traffic = cast(Traffic, self.traffic)
        self.transfer = Transfer(traffic, num_blocks, lambda: self.now, piece_blocks)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_requests=max_num_requests,
            max_num_batched_tokens=chunk,
            transfer=self.transfer,
        )

    @property
    def has_work(self) -> bool:
        return super().has_work or self.traffic.has_events or self.traffic.has_stores

    def held_ids(self) -> set[int]:
        """Those too that yoco copies from once there is a step."""
        return self.traffic.held_ids | {copy.source for copy in self.block_manager.take_copies()}

    def check_nothing_to_do(self, step: Step) -> None:
        """Some turns may pass until a request that gave way is asked for again, but not many.

        Copies for a request that waits for room are made with the next step.
        """
        assert step.copies == self.block_manager.take_copies()
        is_waiting = self._under_way or self.traffic.has_events or self.scheduler.has_unmatched
        if is_waiting or not self.scheduler.has_requests:
            self._num_idle_steps = 0
        else:
            self._num_idle_steps += 1
            assert self._num_idle_steps < 4, "requests wait for nothing"

    def run(self, max_steps: int = 3_000) -> None:
        """Run until nothing is left to do; all pending work of the tiers is done before every step."""
        for _ in range(max_steps):
            if not self.has_work:
                self.check_idle()
                self.traffic.check_idle()
                return
            self.traffic.deliver_all()
            self.now += 0.02
            self.step()
        raise AssertionError("the requests do not end")

    def run_slowly(self, num_events: Callable[[], int], max_turns: int = 400) -> None:
        """A few events before every step, then as `run`."""
        for _ in range(max_turns):
            if not self.has_work:
                break
            for _ in range(num_events()):
                self.traffic.deliver()
            self.now += 0.02
            self.step()
        self.run()
