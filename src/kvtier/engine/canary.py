"""A small share of what the tiers served is computed again while the engine is idle, and compared.

Checksums tell whether bytes are those that were stored. Whether they are the right ones for these tokens, only the
model can tell. A check is a run of blocks that a prompt had loaded: if the device still has them and all before them,
their tokens are computed once more into spare blocks, a few at a time, and both are compared. A block that is further
off than rounding explains is computed a second time in other chunks, which also measures the rounding: only what is
wrong both times counts. The engine's thread owns it; a request that comes meanwhile ends the check at once.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvtier.blocks.hashing import BlockHash
from kvtier.engine.device.kv_comparison import Deviation, Excess, RoundingBounds, deviation
from kvtier.engine.device.runner import Runner
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.block_manager import BlockManager
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.step import Step, StepRow
from kvtier.transfer.device_lease import DeviceLease

WINDOW_TOKENS = 512
"""A check is of as many blocks as hold this many tokens, or of one."""

_MAX_WAITING = 16
_MAX_ATTEMPTS = 8
_MAX_SPARE_SHARE = 8
"""A check takes no more than one in this many of the device's blocks."""
_STEP_S = 0.01
"""Longest step of a check, as far as fewer tokens than a block need not be computed: a request may wait for one."""
_MAX_STEP_TOKENS = 256

SOUND = "sound"
WRONG = "wrong"
UNSURE = "unsure"
"""Two computations in a row differ by more than rounding explains: nothing is known of the block."""
GONE = "gone"
"""The device had lost the blocks before there was time, or had no spare ones."""

_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(slots=True)
class _Check:
    """Blocks `first..end` of a prompt, which were loaded; `tokens` and `hashes` are those of the prompt."""

    tokens: Sequence[int]
    hashes: Sequence[BlockHash]
    first: int
    end: int
    num_attempts: int = 0


@dataclass(slots=True)
class _Pass:
    """A check under way: `request` computes into `spare` what `served` has. `earlier` is what the pass before found."""

    check: _Check
    served: DeviceLease
    spare: DeviceLease
    request: Request
    step_tokens: int
    earlier: list[torch.Tensor] | None = None
    suspects: tuple[int, ...] = ()
    """Blocks, counted from the first of the check, that the pass before found to be off."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A wrong block: its place in the prompt, and where it is furthest off."""

    position: int
    excess: Excess

    def sentence(self) -> str:
        """What is known of it, for logs and health."""
        if not math.isfinite(self.excess.deviation):
            return f"block {self.position} of a prompt has values in layer {self.excess.layer} that are no numbers"
        return (
            f"block {self.position} of a prompt is off by {self.excess.deviation:.0%} in layer {self.excess.layer}, "
            f"{self.excess.times:.1f} times what rounding explains"
        )


class Canary:
    """Checks of one engine: `note` samples, `step` computes a little of them."""

    def __init__(
        self,
        runner: Runner,
        share: float,
        *,
        is_quantized: bool,
        count: Callable[[str], None],
        chance: random.Random | None = None,
    ) -> None:
        """`share` is the part of what is loaded that is checked; `count` hears of each check's result."""
        layout = runner.arena.layout
        self._runner = runner
        self._share = share
        self._count = count
        self._chance = chance or random.Random()
        self._block_tokens = layout.block_tokens
        self._window = max(1, WINDOW_TOKENS // layout.block_tokens)
        self._bounds = RoundingBounds(getattr(torch, layout.dtype), layout.layers, is_quantized=is_quantized)
        self._waiting: deque[_Check] = deque()
        self._pass: _Pass | None = None
        self._step_tokens = layout.block_tokens
        self._num_passed_over = self._gap() if share else 0

    @property
    def has_work(self) -> bool:
        return self._pass is not None or bool(self._waiting)

    @property
    def is_under_way(self) -> bool:
        """A check has begun, and holds blocks of the device."""
        return self._pass is not None

    # --- sampling ----------------------------------------------------------------------------------------------------

    def note(self, request: Request) -> None:
        """A request is over: some of what was loaded for it may be checked. Costs the same whatever was loaded."""
        if not self._share:
            return
        for first, end in request.prefetch.history.loaded_spans:
            num_windows = -(-(end - first) // self._window)
            while self._num_passed_over < num_windows:
                start = first + self._num_passed_over * self._window
                self._add(_Check(request.tokens, request.blocks.hashes, start, min(end, start + self._window)))
                self._num_passed_over += 1 + self._gap()
            self._num_passed_over -= num_windows

    def _gap(self) -> int:
        """How many windows are passed over before the next that is checked: each is with the same probability."""
        if self._share >= 1:
            return 0
        return int(math.log(1.0 - self._chance.random()) / math.log1p(-self._share))

    def _add(self, check: _Check) -> None:
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.popleft()
            self._count(GONE)
        self._waiting.append(check)

    # --- checking ----------------------------------------------------------------------------------------------------

    def step(self, blocks: BlockManager) -> Finding | None:
        """A few milliseconds of a check, on a device that has nothing else to do. What it found, if that was wrong."""
        if self._pass is None:
            self._pass = self._begin(blocks)
            return None
        if self._pass.request.num_computed < len(self._pass.request.tokens):
            self._compute(self._pass)
            return None
        return self._judge(self._pass, blocks)

    def let_go(self, blocks: BlockManager) -> None:
        """Something else needs the device: a check under way gives its blocks back, and begins anew later."""
        under_way, self._pass = self._pass, None
        if under_way is None:
            return
        self._release(under_way, blocks)
        if under_way.check.num_attempts < _MAX_ATTEMPTS:
            self._waiting.appendleft(under_way.check)
        else:
            self._count(GONE)

    def forget(self) -> None:
        """The device's blocks are all free again, whoever had them: nothing is left to compare."""
        self._pass = None
        self._waiting.clear()

    def _begin(self, blocks: BlockManager) -> _Pass | None:
        check = self._waiting.popleft()
        check.num_attempts += 1
        served = blocks.hold_cached(check.hashes[: check.end])
        if len(served.ids) < check.end:
            blocks.release(served)
            self._count(GONE)
            return None
        num_spare = check.end - check.first
        has_room = num_spare <= max(1, blocks.num_blocks // _MAX_SPARE_SHARE)
        spare = blocks.take_spare(num_spare) if has_room else None
        if spare is None:
            blocks.release(served)
            self._count(GONE)
            return None
        return self._pass_of(check, served, spare, self._step_tokens)

    def _pass_of(self, check: _Check, served: DeviceLease, spare: DeviceLease, step_tokens: int) -> _Pass:
        request = Request("canary", check.tokens[: check.end * self._block_tokens], _PARAMS, max_tokens=1)
        request.blocks.ids = served.ids[: check.first] + spare.ids
        request.num_computed = check.first * self._block_tokens
        return _Pass(check, served, spare, request, step_tokens)

    def _compute(self, under_way: _Pass) -> None:
        request = under_way.request
        is_first = under_way.earlier is None
        step_tokens = self._step_tokens if is_first else under_way.step_tokens
        count = min(step_tokens, len(request.tokens) - request.num_computed)
        began_at = time.perf_counter()
        self._runner.submit(Step([StepRow(request, request.num_computed, count, False)], [], count)).wait()
        self._runner.synchronize()
        request.num_computed += count
        if is_first:
            self._learn(count, time.perf_counter() - began_at)

    def _learn(self, num_tokens: int, seconds: float) -> None:
        """The next step has twice as many tokens if this one took far less than it may, and half as many if more."""
        if seconds > _STEP_S:
            self._step_tokens = max(self._block_tokens, self._step_tokens // 2)
        elif num_tokens == self._step_tokens and seconds < _STEP_S / 2:
            self._step_tokens = min(max(self._block_tokens, _MAX_STEP_TOKENS), 2 * self._step_tokens)

    def _judge(self, under_way: _Pass, blocks: BlockManager) -> Finding | None:
        """Compare what was computed with what was served. A first suspicion begins a second pass."""
        if under_way.earlier is not None:
            finding, result = self._verdict(under_way, under_way.earlier)
            self._end(under_way, blocks, result)
            return finding
        suspects = tuple(
            number
            for number in range(len(under_way.spare.ids))
            if self._bounds.excess(self._deviation(under_way, number)).times > 1
        )
        if not suspects:
            self._end(under_way, blocks, SOUND)
            return None
        arena = self._runner.arena.blocks
        earlier = [arena[block_id].cpu() for block_id in under_way.spare.ids]
        # In chunks that no pass before had: what differs between both is rounding.
        step_tokens = max(1, self._block_tokens - 1)
        self._pass = self._pass_of(under_way.check, under_way.served, under_way.spare, step_tokens)
        self._pass.earlier, self._pass.suspects = earlier, suspects
        return None

    def _verdict(self, under_way: _Pass, earlier: list[torch.Tensor]) -> tuple[Finding | None, str]:
        arena, first = self._runner.arena.blocks, under_way.check.first
        worst: Finding | None = None
        is_unsure = False
        for number in under_way.suspects:
            before = earlier[number].to(arena.device)
            computed, served = arena[under_way.spare.ids[number]], arena[under_way.served.ids[first + number]]
            noise = deviation(before, computed)
            if self._bounds.excess(noise).times > 1:
                is_unsure = True
                continue
            excess = min(
                (self._bounds.excess(deviation(served, one), noise) for one in (before, computed)),
                key=lambda one: one.times,
            )
            if excess.times > 1 and (worst is None or excess.times > worst.excess.times):
                worst = Finding(first + number, excess)
        return worst, WRONG if worst is not None else UNSURE if is_unsure else SOUND

    def _deviation(self, under_way: _Pass, number: int) -> Deviation:
        """Of what was served of a block, counted from the first of the check, from what was computed."""
        arena = self._runner.arena.blocks
        served_id = under_way.served.ids[under_way.check.first + number]
        return deviation(arena[served_id], arena[under_way.spare.ids[number]])

    def _end(self, under_way: _Pass, blocks: BlockManager, result: str) -> None:
        self._pass = None
        self._release(under_way, blocks)
        self._count(result)

    def _release(self, under_way: _Pass, blocks: BlockManager) -> None:
        blocks.release(under_way.spare)
        blocks.release(under_way.served)
