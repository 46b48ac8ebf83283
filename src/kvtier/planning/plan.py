"""The effect of memory and disk of each size on a trace: hits, time to first token, GPU time saved; and advice.

LRU's hits follow from the distances between uses, exactly and for all sizes at once. The adaptive policy is simulated,
size by size (`kvtier.simulate.tiers`). Both assume no queues, and a prefill at a constant share of the GPU's peak
speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.blocks.eviction import Eviction
from kvtier.errors import ConfigError
from kvtier.planning.reuse import Use, block_tokens_of, num_distinct, uses_of
from kvtier.simulate.costs import USED_SHARE, Costs
from kvtier.simulate.tiers import TieredReplay, TierSettings, share_of_sorted
from kvtier.simulate.trace import TracedRequest, by_arrival
from kvtier.sizes import format_size

_DAY_S = 86_400.0
_SHORT_S = 900.0
_NUM_SIZES = 9
_LATE_SHARE = 0.9
_ENOUGH = 0.9
"""Advice recommends the smallest size that gains this share of the possible gain."""
_LITTLE = 0.01
_BELOW = 4
"""If no memory is given, a disk is planned below one part in this many of the memory that would be enough."""
_UNIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of memory and disk of one size under one policy."""

    hit_share: float
    saved_gpu_s: float
    """GPU seconds saved per day."""
    mean_ttft_s: float
    late_ttft_s: float | None
    """The time to first token that nine of ten requests do not exceed; unknown from a curve alone."""


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """One size. `adaptive` is the effect under the adaptive policy, if that was simulated; `runs` is the policy to
    advise on."""

    memory_bytes: int
    disk_bytes: int
    lru: Effect
    adaptive: Effect | None = None
    runs: Eviction = "adaptive"

    @property
    def effect(self) -> Effect:
        """The effect on which advice is based."""
        return self.lru if self.adaptive is None or self.runs == "lru" else self.adaptive


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as it is shown. `by_memory` has no disk; `by_disk` has the memory that the advice is for."""

    title: str
    gpu: str
    by_memory: list[PlanPoint]
    by_disk: list[PlanPoint]
    advice: list[str]
    notes: list[str]


Simulate = Callable[[Sequence[TracedRequest], TierSettings, Costs, int], TieredReplay]
"""Like `replay_tiers`: requests in the order of their arrival, a server, costs, tokens per block."""


def plan_trace(
    requests: Sequence[TracedRequest],
    costs: Costs,
    *,
    name: str,
    block_tokens: int | None = None,
    memory_bytes: int | None = None,
    disk_bytes: int | None = None,
    simulate: Simulate | None = None,
    eviction: Eviction = "adaptive",
) -> Plan:
    """Make a plan from a trace. `memory_bytes` and `disk_bytes` are the current sizes, from which the advice starts.

    The advice is for a deployment that runs `eviction`; what the other policy does is shown beside it.

    Raises `ConfigError` for a trace without blocks.
    """
    block_tokens = block_tokens or block_tokens_of(requests)
    requests = by_arrival(requests)
    replay = _Replay(uses_of(requests), block_tokens, costs)
    all_bytes = num_distinct(requests) * replay.block_bytes

    @functools.cache
    def point(memory: int, disk: int) -> PlanPoint:
        lru = replay.effect(memory, disk)
        memory_blocks, disk_blocks = memory // replay.block_bytes, disk // replay.block_bytes
        if simulate is None or not memory_blocks:
            return PlanPoint(memory, disk, lru, runs=eviction)
        settings = TierSettings(memory_blocks, disk_blocks)
        return PlanPoint(memory, disk, lru, replay.of(simulate(requests, settings, costs, block_tokens)), eviction)

    by_memory = [point(size, 0) for size in sizes_for(all_bytes, memory_bytes)]
    now = point(memory_bytes or 0, disk_bytes or 0)
    memory = enough(by_memory, now).memory_bytes // _BELOW if memory_bytes is None else memory_bytes
    by_disk = [point(memory, size) for size in sizes_for(all_bytes, disk_bytes) if size > memory > 0]
    notes = [
        f"{len(requests)} requests in {format_duration(replay.seconds)}, {replay.tokens:,} prompt tokens in blocks of "
        f"{block_tokens}; all distinct blocks take {format_size(all_bytes)} "
        f"({format_size(costs.shape.kv_bytes)} per token)",
        _cost_note(costs),
        _policy_note(by_memory, by_disk, eviction),
    ]
    if replay.seconds < _SHORT_S:
        notes.append(f"the trace covers only {format_duration(replay.seconds)}: hours a day assume traffic like this")
    advice = advise(by_memory, by_disk, now, costs.gpu.name)
    return Plan(f"{name}: {costs.shape.name} on {costs.gpu.name}", costs.gpu.name, by_memory, by_disk, advice, notes)


LRU_NOTE = (
    "all figures are for LRU; the adaptive policy was not simulated, and is designed to hit more if memory is short, "
    "and about as much otherwise"
)


class _Replay:
    """The requests of a trace on LRU caches of any size; exact if each prompt fits into memory."""

    def __init__(self, uses: Sequence[Use], block_tokens: int, costs: Costs) -> None:
        self._uses = uses
        self._block_tokens = block_tokens
        self._costs = costs
        self.block_bytes = block_tokens * costs.shape.kv_bytes
        self.tokens = sum(use.tokens for use in uses)
        if not self.tokens:
            raise ConfigError("the trace has no prompt tokens: there is nothing to plan from")
        self.seconds = max(1.0, uses[-1].arrived_s - uses[0].arrived_s)
        self._whole_s = [costs.prefill_s(0, use.tokens) for use in uses]

    def effect(self, memory_bytes: int, disk_bytes: int) -> Effect:
        memory_blocks, disk_blocks = memory_bytes // self.block_bytes, disk_bytes // self.block_bytes
        costs, kv_bytes = self._costs, self._costs.shape.kv_bytes
        hit_tokens = 0
        saved_s = 0.0
        ttfts_s = []
        for use, whole_s in zip(self._uses, self._whole_s, strict=True):
            in_memory = self._tokens(use, use.hit_blocks(memory_blocks))
            found = max(in_memory, self._tokens(use, use.hit_blocks(disk_blocks)))
            disk_bytes_read = (found - in_memory) * kv_bytes
            if not costs.is_worth_loading(in_memory, found, disk_bytes_read):
                found, disk_bytes_read = in_memory, 0
            load_s = costs.load_s(in_memory * kv_bytes, from_disk=False) + costs.load_s(disk_bytes_read, from_disk=True)
            compute_s = costs.rest_s(found, use.tokens)
            hit_tokens += found
            saved_s += whole_s - compute_s
            ttfts_s.append(load_s + compute_s)
        ttfts_s.sort()
        mean_s = sum(ttfts_s) / len(ttfts_s)
        return Effect(hit_tokens / self.tokens, self._per_day(saved_s), mean_s, share_of_sorted(ttfts_s, _LATE_SHARE))

    def of(self, replayed: TieredReplay) -> Effect:
        saved_s = self._per_day(replayed.saved_gpu_s)
        return Effect(replayed.hit_rate, saved_s, replayed.mean_ttft_s, replayed.ttft_s(_LATE_SHARE))

    def _per_day(self, seconds: float) -> float:
        return seconds * _DAY_S / self.seconds

    def _tokens(self, use: Use, num_blocks: int) -> int:
        return min(num_blocks * self._block_tokens, use.tokens)


def sizes_for(all_bytes: int, current: int | None) -> list[int]:
    """Sizes to plan for: powers of two up to one that holds everything, and the current size."""
    last = 1 << max(0, all_bytes - 1).bit_length()
    sizes = {last >> step for step in range(_NUM_SIZES) if last >> step}
    return sorted(sizes | ({current} if current else set()))


def enough(points: Sequence[PlanPoint], now: PlanPoint) -> PlanPoint:
    """The smallest size above `now` that has most of the possible gain, or `now` if there is little to gain."""
    larger = [point for point in points if _room(point) > _room(now)]
    most = max((point.effect.hit_share for point in larger), default=0.0) - now.effect.hit_share
    if most < _LITTLE:
        return now
    return next(point for point in larger if point.effect.hit_share - now.effect.hit_share >= _ENOUGH * most)


def advise(by_memory: Sequence[PlanPoint], by_disk: Sequence[PlanPoint], now: PlanPoint, gpu: str) -> list[str]:
    """Sentences on what to buy or set."""
    advice = [_step(now, enough(by_memory, now), "memory", gpu)]
    if by_disk:
        before = next((point for point in by_memory if point.memory_bytes == by_disk[0].memory_bytes), now)
        before = now if now.disk_bytes else before
        advice.append(_step(before, enough(by_disk, before), "disk", gpu))
    return advice


def _step(now: PlanPoint, then: PlanPoint, what: str, gpu: str) -> str:
    rooms = [(now.memory_bytes, "memory"), (now.disk_bytes, "disk")]
    has = " and ".join(f"{format_size(size)} of {kind}" for size, kind in rooms if size) or "no cache"
    if then is now and not _room(now):
        return f"{what}: a cache of any size gains less than a point, since almost no prompt is repeated"
    if then is now:
        return f"{what}: more than {has} gains less than a point"
    more = _room(then) - (now.disk_bytes if what == "disk" else now.memory_bytes)
    points = 100 * (then.effect.hit_share - now.effect.hit_share)
    hours = (then.effect.saved_gpu_s - now.effect.saved_gpu_s) / 3600
    return (
        f"+{format_size(more)} of {what}: +{points:.0f} points ({100 * now.effect.hit_share:.0f}% to "
        f"{100 * then.effect.hit_share:.0f}%), {format_hours(hours)} {gpu} hours a day, on top of {has}"
    )


def _room(point: PlanPoint) -> int:
    return max(point.memory_bytes, point.disk_bytes)


def _cost_note(costs: Costs) -> str:
    disk = format_size(int(costs.disk_bytes_per_s))
    if costs.prefill_tokens_per_s is not None:
        return f"assumed: a prefill of {costs.prefill_tokens_per_s:,.0f} tokens/s as given, a disk of {disk}/s"
    speed = 1 / costs.prefill_s(0, 1)
    return (
        f"assumed: a prefill at {USED_SHARE:.0%} of the {costs.gpu.name}'s peak (about {speed:,.0f} tokens/s for short "
        f"prompts), {format_size(int(costs.gpu.host_bytes_per_s))}/s from memory, {disk}/s from disk; no queues"
    )


def _policy_note(by_memory: Sequence[PlanPoint], by_disk: Sequence[PlanPoint], eviction: Eviction) -> str:
    gains = [
        (100 * (point.adaptive.hit_share - point.lru.hit_share), point)
        for point in (*by_memory, *by_disk)
        if point.adaptive is not None
    ]
    if not gains:
        return LRU_NOTE
    best, worst = max(gains, key=lambda pair: pair[0]), min(gains, key=lambda pair: pair[0])
    policy = "LRU; the adaptive policy was" if eviction == "lru" else "the adaptive policy,"
    return (
        f"the advice is for {policy} simulated on the same trace: it differs from LRU by "
        f"{worst[0]:+.1f} (at {_sizes_of(worst[1])}) to {best[0]:+.1f} points (at {_sizes_of(best[1])}); "
        f"LRU is exact"
    )


def _sizes_of(point: PlanPoint) -> str:
    disk = f" and {format_size(point.disk_bytes)} of disk" if point.disk_bytes else ""
    return f"{format_size(point.memory_bytes)} of memory{disk}"


def format_hours(hours: float) -> str:
    return f"{hours:.0f}" if hours >= 10 else f"{hours:.1f}" if hours >= 0.1 else f"{hours:.2f}"


def format_duration(seconds: float) -> str:
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
