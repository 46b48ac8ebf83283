"""The canary computes a small share of loaded blocks again while the engine is idle, and compares.

A checksum shows that bytes are those that were stored. Only the model can show that they belong to these tokens. A
check covers a run of blocks that a prompt has loaded. If the device still has them and all blocks before them, the
canary computes their tokens again into spare blocks, a few at a time, and compares both. A block that differs by more
than rounding is computed a second time in other chunks, which also measures the rounding: only a block that is wrong
both times counts. The engine's thread owns the canary; a request that arrives meanwhile ends the check at once.
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
"""A check covers this many tokens in whole blocks, at least one block."""

_MAX_WAITING = 16
_MAX_ATTEMPTS = 8
_MAX_SPARE_SHARE = 8
"""A check takes no more than one in this many of the device's blocks."""
_STEP_S = 0.01
"""Longest step of a check, since a request may wait for one. A step has at least one block of tokens, however long."""
_MAX_STEP_TOKENS = 256

SOUND = "sound"
WRONG = "wrong"
UNSURE = "unsure"
"""Two computations of a block differ by more than rounding: neither can be trusted."""
GONE = "gone"
"""The device lost the blocks before they were checked, or had no spare ones."""

_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(slots=True)
class _Check:
    """Loaded blocks `first..end` of the prompt that has these `tokens` and `hashes`."""

    tokens: Sequence[int]
    hashes: Sequence[BlockHash]
    first: int
    end: int
    num_attempts: int = 0


@dataclass(slots=True)
class _Pass:
    """One computation of a check: `request` computes the blocks of `served` into `spare`.

    `earlier` are the blocks that the first pass computed, set in the second.
    """

    check: _Check
    served: DeviceLease
    spare: DeviceLease
    request: Request
    step_tokens: int
    earlier: list[torch.Tensor] | None = None
    suspects: tuple[int, ...] = ()
    """The blocks that the first pass found to be off, counted from the first of the check."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The first block of a check that is off: its position in the prompt, and where it is furthest off.

    It was computed upon the blocks before it as they were served: one of those may be the wrong one.
    """

    position: int
    excess: Excess

    def sentence(self) -> str:
        """The finding in words, for logs and `/health`."""
        wrong = f"block {self.position} of a prompt{', or one before it,' if self.position else ''} is wrong"
        if not math.isfinite(self.excess.deviation):
            return f"{wrong}: it has values in layer {self.excess.layer} that are no numbers"
        return (
            f"{wrong}: it is off by {self.excess.deviation:.0%} in layer {self.excess.layer}, "
            f"{self.excess.times:.1f} times what rounding explains"
        )


class Canary:
    """The checks of one engine: `note` samples them, `step` computes a little of one."""

    def __init__(
        self,
        runner: Runner,
        share: float,
        *,
        is_quantized: bool,
        count: Callable[[str], None],
        chance: random.Random | None = None,
    ) -> None:
        """`share` is the part of all loaded blocks that is checked; `count` is called with the result of each check."""
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
        self._num_skipped = self._gap() if share else 0
        """Windows to skip before the next check."""

    @property
    def has_work(self) -> bool:
        return self._pass is not None or bool(self._waiting)

    @property
    def is_under_way(self) -> bool:
        """A check has begun, and holds blocks of the device."""
        return self._pass is not None

    # --- sampling ----------------------------------------------------------------------------------------------------

    def note(self, request: Request) -> None:
        """A request is over: some of the blocks that it loaded may be checked. Takes no longer for many blocks."""
        if not self._share:
            return
        for first, end in request.prefetch.history.loaded_spans:
            num_windows = -(-(end - first) // self._window)
            while self._num_skipped < num_windows:
                start = first + self._num_skipped * self._window
                self._add(_Check(request.tokens, request.blocks.hashes, start, min(end, start + self._window)))
                self._num_skipped += 1 + self._gap()
            self._num_skipped -= num_windows

    def _gap(self) -> int:
        """How many windows to skip before the next check, so that each window is checked with the same probability."""
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
        """Work on a check for a few milliseconds, while the device is idle. Returns a wrong block, if it found one."""
        if self._pass is None:
            self._pass = self._begin(blocks)
            return None
        if self._pass.request.num_computed < len(self._pass.request.tokens):
            self._compute(self._pass)
            return None
        return self._judge(self._pass, blocks)

    def let_go(self, blocks: BlockManager) -> None:
        """Something else needs the device: the check in progress gives its blocks back, and begins again later."""
        under_way, self._pass = self._pass, None
        if under_way is None:
            return
        self._release(under_way, blocks)
        if under_way.check.num_attempts < _MAX_ATTEMPTS:
            self._waiting.appendleft(under_way.check)
        else:
            self._count(GONE)

    def forget(self) -> None:
        """All blocks of the device were freed, so nothing is left to compare."""
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
        """Double the tokens of the next step if this one took less than half of `_STEP_S`; halve them above it."""
        if seconds > _STEP_S:
            self._step_tokens = max(self._block_tokens, self._step_tokens // 2)
        elif num_tokens == self._step_tokens and seconds < _STEP_S / 2:
            self._step_tokens = min(max(self._block_tokens, _MAX_STEP_TOKENS), 2 * self._step_tokens)

    def _judge(self, under_way: _Pass, blocks: BlockManager) -> Finding | None:
        """Compare the computed blocks with the loaded ones. If some differ in the first pass, begin the second."""
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
        # In other chunks than before: the difference between both passes is rounding.
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
        """How far a loaded block is from the computed one; `number` counts from the first of the check."""
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
