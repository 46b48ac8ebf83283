"""Decides between loading and computing, from measured speeds. The engine's thread asks. No torch.

A load that is clearly faster than computing is made. If neither is clearly faster, the tier brings blocks from the back
while the engine computes from the front, where that wins. A late load is abandoned once computing would be sooner. For
engines that ask only once and compute what follows the load, the decision is where the load ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtier.blocks.layout import KvLayout
from kvtier.tiers.speeds import Speeds
from kvtier.transfer.load import Load, LoadPlan, Order, Span

_UNIT_BYTES = 64 << 20
"""A unit costs three requests to a cache server, whose Python code delays decode steps beside it."""

_CLEARLY_FASTER = 0.5
"""A load that takes at most this share of the compute time is always made: the device has other things to compute."""

_WORTH_MEETING = 0.85
_MEETING_STEPS = 2
"""Computing from the front while loading from the back adds about this many steps."""

_UNITS_TO_MEET = 16
_MIN_UNIT_S = 0.001
_LATE_SLACK_S = 0.01
_FIRST_LOAD_S = 0.25
"""A tier's first load is never late before this: one that is abandoned would leave the tier's speed unknown, and what
computing takes may rest on a few steps at start-up, too."""

_FIRST_REST_S = 1.0
_LAST_REST_S = 10.0
_RETRY_SLOW_S = 10.0
_NUM_MATCH_TIMES = 5
_NUM_DELAYS = 3
_SLOWEST_BYTES_PER_S = 64e6
_GIVES_UP_AFTER = 1.5
"""A load is abandoned after this many times its compute time, if nothing can be computed meanwhile."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """The decision not to use a tier, for `rest_s` in total."""

    until: float
    rest_s: float


class LoadOrCompute:
    """Decides for one engine."""

    def __init__(
        self, speeds: Speeds, layout: KvLayout, chunk_tokens: int, *, always_loads: bool, clock: Callable[[], float]
    ) -> None:
        """With `always_loads`, every hit is loaded, however long it takes."""
        self.speeds = speeds
        self._block_tokens = layout.block_tokens
        self._block_bytes = layout.block_bytes
        self._chunk_tokens = chunk_tokens
        self._always_loads = always_loads
        self._clock = clock
        self._rests: dict[str, _Rest] = {}
        self._slow_since: dict[str, float] = {}
        self._delays: dict[str, deque[float]] = {}
        self._match_times: deque[float] = deque(maxlen=_NUM_MATCH_TIMES)

    def plan(self, spans: Sequence[Span], position: int, prompt_tokens: int, busy_s: float = 0.0) -> LoadPlan | None:
        """What to load when all blocks before `position` are on the device; None if the rest is to be computed.

        The device is busy with other requests for `busy_s`. A load from memory may take that long without delaying the
        prompt.
        """
        span = next((span for span in spans if span.first <= position < span.end), None)
        if span is None:
            return None
        nbytes = (span.end - position) * self._block_bytes
        load_s = self.speeds.load_s(span.tier, nbytes)
        plan = LoadPlan(span, position, span.end, Order.FRONT, load_s, max(1, _UNIT_BYTES // self._block_bytes))
        if self._always_loads:
            return plan
        if self._is_resting(span.tier):
            return None
        compute_s = self.compute_s(position, span.end, prompt_tokens)
        if load_s is None:  # this load measures it, so it may take as long as is still worth it
            return replace(plan, expected_s=max(compute_s or 0.0, _FIRST_LOAD_S))
        if compute_s is None or load_s <= _CLEARLY_FASTER * compute_s:
            return plan
        if span.is_in_memory and load_s <= busy_s:
            return plan
        before_last = (prompt_tokens - 1) // self._block_tokens
        if position >= before_last:  # a step that runs anyway computes these few tokens too: not the tier's fault
            return plan if load_s <= compute_s else None
        from_back = self._from_back(plan, min(span.end, before_last), prompt_tokens)
        if from_back is not None:
            return from_back
        return plan if load_s <= compute_s else self._retry(replace(plan, expected_s=compute_s))

    def end_of_load(self, spans: Sequence[Span], first: int, prompt_tokens: int) -> int:
        """The block at which to stop loading, for a prompt whose blocks before `first` are on the device.

        For engines that load once and compute what follows. The result is `first`, or the end of one of `spans`, which
        are contiguous.
        """
        spans = [span for span in spans if span.end > first]
        ends = [first, *(span.end for span in spans)]
        if self._always_loads or not spans:
            return ends[-1]
        totals_s: list[float] = []
        loaded_s: float | None = 0.0
        for end, span in zip(ends, [None, *spans], strict=True):
            if span is not None:
                load_s = self.speeds.load_s(span.tier, (span.end - max(first, span.first)) * self._block_bytes)
                loaded_s = None if load_s is None or loaded_s is None else loaded_s + load_s
            rest_s = self._rest_s(end, prompt_tokens)
            if loaded_s is None or rest_s is None:
                return ends[-1]  # not measured yet: this measures it
            totals_s.append(loaded_s + rest_s)
        best = max(end for end, total_s in zip(ends, totals_s, strict=True) if total_s <= min(totals_s))
        if best < ends[-1] and self._may_retry(next(span.tier for span in spans if span.end > best)):
            return ends[-1]
        return best

    def timeout_s(self, first: int, end: int, prompt_tokens: int, least_s: float) -> float:
        """The deadline of such a load: a little more than the time to compute the same, and at least `least_s`."""
        compute_s, rest_s = self._rest_s(first, prompt_tokens), self._rest_s(end, prompt_tokens)
        if self._always_loads or compute_s is None or rest_s is None:
            return least_s + (end - first) * self._block_bytes / _SLOWEST_BYTES_PER_S
        return max(least_s, _GIVES_UP_AFTER * (compute_s - rest_s))

    def _rest_s(self, first: int, prompt_tokens: int) -> float | None:
        """How long computing the prompt from block `first` to its end takes."""
        start = first * self._block_tokens
        return self.speeds.prefill_s(start, max(0, prompt_tokens - start), self._chunk_tokens)

    def share(self, load: Load, prompt_tokens: int) -> int:
        """For a load from the back: how many blocks to compute next, so that both sides meet at the same time."""
        left = load.num_left
        if not left:
            return 0
        if load.is_over:
            return left
        block_s = self._per_block_s(load, self._clock() - load.times.started_at)
        compute_s = self.compute_s(load.front, load.front + left, prompt_tokens)
        if compute_s is None:
            return max(1, left // 2)
        if left * block_s < self.speeds.step_s():
            return 0  # it arrives before another step ends
        return max(1, min(left, round(left * block_s / max(block_s + compute_s / left, 1e-9))))

    def is_late(self, load: Load, prompt_tokens: int, since: float, num_sharing: int, busy_s: float = 0.0) -> bool:
        """Whether a load is late and computing its missing blocks would be faster.

        It is never late before `since`. While blocks of it arrive, loads that share its tier slow each other down, as
        their prompts would if all were computed. `busy_s` is as for `plan`.
        """
        if self._always_loads or load.is_submitted or load.is_over:
            return False
        elapsed = self._clock() - since
        if load.plan.span.is_in_memory and elapsed <= busy_s:
            return False
        shared = max(1, num_sharing) if load.num_arrived else 1
        expected = shared * (load.plan.expected_s or 0.0) + _LATE_SLACK_S
        if elapsed <= expected:
            return False
        if load.plan.order is Order.FRONT:
            first, num_missing = load.plan.first + load.num_arrived, load.num_blocks - load.num_arrived
        elif load.num_left:
            return False  # the engine has something to do meanwhile
        else:
            first, num_missing = load.front, load.arrived()[0] - load.front
        compute_s = self.compute_s(first, first + num_missing, prompt_tokens)
        if compute_s is None:
            return False
        return num_missing * self._per_block_s(load, elapsed) > shared * compute_s

    def compute_s(self, first: int, end: int, prompt_tokens: int | None) -> float | None:
        """The extra time if the prompt's blocks `first..end` are computed too.

        If the length of the prompt is unknown, the time that these blocks take on their own.
        """
        start, stop = first * self._block_tokens, end * self._block_tokens
        if prompt_tokens is None:
            return self.speeds.prefill_s(start, stop - start, self._chunk_tokens)
        total = max(stop, prompt_tokens)
        whole = self.speeds.prefill_s(start, total - start, self._chunk_tokens)
        left = max(total - stop, 1)  # even if the whole prompt was loaded, its last token is computed
        rest = self.speeds.prefill_s(total - left, left, self._chunk_tokens)
        return None if whole is None or rest is None else max(0.0, whole - rest)

    def tokens_s(self, num_tokens: int) -> float | None:
        """How long computing a prompt's first tokens takes; None before a step large enough to judge was measured."""
        if not self.speeds.knows_prefill(num_tokens):
            return None
        return self.speeds.prefill_s(0, num_tokens, self._chunk_tokens)

    def note_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """A load from `tier` that was not abandoned took this long: the tier is healthy."""
        self.speeds.note_load(tier, nbytes, seconds)
        self.note_well(tier)

    def note_well(self, tier: str) -> None:
        """A load from `tier` arrived, however slowly: the tier need not rest."""
        self._rests.pop(tier, None)

    def note_match(self, seconds: float) -> None:
        """All tiers together took this long to answer a match."""
        self._match_times.append(seconds)

    def is_match_worth_it(self, first: int, end: int) -> bool:
        """Whether asking for blocks `first..end` is faster than computing them. If not, it is tried at times."""
        compute_s = self.compute_s(first, end, None)
        times = sorted(self._match_times)
        if self._always_loads or compute_s is None or not times or times[len(times) // 2] < compute_s:
            return True
        return self._may_retry("matching")

    def note_met(self, load: Load) -> None:
        """Both sides have met: measures how much computing and loading slow each other down."""
        if load.plan.meets_after_s > 0:
            delay = (self._clock() - load.times.started_at) / load.plan.meets_after_s
            self._delays.setdefault(load.plan.span.tier, deque(maxlen=_NUM_DELAYS)).append(delay)

    def note_late(self, tier: str) -> None:
        """A load from `tier` was abandoned: the tier rests, longer each time."""
        rest = self._rests.get(tier)
        rest_s = _FIRST_REST_S if rest is None else min(2 * rest.rest_s, _LAST_REST_S)
        self._rests[tier] = _Rest(self._clock() + rest_s, rest_s)

    def _per_block_s(self, load: Load, elapsed_s: float) -> float:
        """Time per block: as measured on this load so far, or else as its tier has shown before."""
        expected = (load.plan.expected_s or 0.0) / load.num_blocks
        if load.num_arrived:
            return elapsed_s / load.num_arrived
        return max(expected, elapsed_s / load.num_blocks)

    def _from_back(self, plan: LoadPlan, end: int, prompt_tokens: int) -> LoadPlan | None:
        """A load from the back, from `end`, while the front is computed, if that is clearly the fastest; else None.

        The prompt's last token lies behind `end`: it is computed once everything before it is done.
        """
        num_blocks = end - plan.first
        load_s = self.speeds.load_s(plan.span.tier, num_blocks * self._block_bytes)
        compute_s = self.compute_s(plan.first, end, prompt_tokens)
        if plan.span.comes_in_order or load_s is None or compute_s is None:
            return None
        load_block_s, compute_block_s = load_s / num_blocks, compute_s / num_blocks
        num_loaded = num_blocks * compute_block_s / (load_block_s + compute_block_s)
        meet_s = num_loaded * load_block_s + _MEETING_STEPS * self.speeds.step_s()
        tier = plan.span.tier
        delays = sorted(self._delays.get(tier, (1.0,)))
        if meet_s * delays[len(delays) // 2] > _WORTH_MEETING * min(load_s, compute_s) and not self._may_retry(
            f"meeting {tier}"
        ):
            return None
        unit = max(1, round(num_loaded / _UNITS_TO_MEET), round(_MIN_UNIT_S / load_block_s))
        unit = min(unit, plan.unit)
        return replace(plan, end=end, order=Order.BACK, expected_s=load_s, unit=unit, meets_after_s=meet_s)

    def _is_resting(self, tier: str) -> bool:
        rest = self._rests.get(tier)
        return rest is not None and self._clock() < rest.until

    def _retry(self, plan: LoadPlan) -> LoadPlan | None:
        """Allow a tier that was slower than computing another try at times: it may have become fast."""
        return plan if self._may_retry(plan.span.tier) else None

    def _may_retry(self, what: str) -> bool:
        now = self._clock()
        if now - self._slow_since.setdefault(what, now) < _RETRY_SLOW_S:
            return False
        self._slow_since[what] = now
        return True
