"""Prefixes between one device and the tiers below it, as an engine's scheduler sees them. No torch.

`begin` makes a `Prefetch` for each prompt; `poll` matches the waiting ones; `filled` stores the blocks that a step has
filled. The engine's thread calls everything; only `wait`, `settle`, `start_over` and `close` wait. Without tiers,
`NoTransfer` takes its place.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from prometheus_client import CollectorRegistry

from kvtier.tiers.explanation import Explanation, MatchEnd
from kvtier.transfer.copier import Copies
from kvtier.transfer.device_lease import DeviceLease
from kvtier.transfer.match_budget import PIECE_BLOCKS, MatchBudget
from kvtier.transfer.prefetch import NoPrefetch, Prefetch, SharedState
from kvtier.transfer.prefetch_state import MatchEnding, PrefetchState
from kvtier.transfer.prompt_blocks import PromptBlocks
from kvtier.transfer.traffic import Traffic

_LOOK_AHEAD = 64
"""Limit on waiting prompts matched before their turn: each leases its hits."""

_PATIENCE_S = 0.05
"""How long blocks that wait for a tier may hold up a prompt that needs them."""


class Transfer:
    """One per engine, whose device has `num_blocks`."""

    has_tiers = True

    def __init__(
        self,
        traffic: Traffic,
        num_blocks: int,
        clock: Callable[[], float] = time.monotonic,
        piece_blocks: int = PIECE_BLOCKS,
    ) -> None:
        """Beside a step, `piece_blocks` of a prompt are hashed at a time, and four times as many blocks are taken."""
        self.traffic = traffic
        self._num_blocks = num_blocks
        self._clock = clock
        self._piece_blocks = piece_blocks
        self.off_because = ""
        """Why nothing is loaded; empty while loading is on. Computed blocks are stored either way."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        traffic = self.traffic
        budget = MatchBudget(self._clock, self._piece_blocks)
        last_steps = [traffic.marks.num_steps] * self._num_blocks
        self._shared = SharedState(traffic, budget, last_steps, generation=traffic.generation)
        self._short_since: float | None = None

    def begin(self, blocks: PromptBlocks) -> Prefetch:
        """Begin the prefetch of a new prompt. A `poll` asks the tiers while the prompt waits."""
        return Prefetch(self._shared, blocks)

    # --- waiting prompts -------------------------------------------------------------------------------------------

    def poll(self, waiting: Iterable[Prefetch], *, is_idle: bool, taken_in_s: float) -> list[DeviceLease]:
        """Begin to match the prompts that are next. Returns blocks that were copied away: the device can reuse them.

        If `is_idle`, nothing can be computed meanwhile, so the first hits are loaded before other prompts are matched.
        Otherwise prompts were taken in for `taken_in_s` since the last step, which leaves less time for matching.
        """
        traffic, shared = self.traffic, self._shared
        budget = shared.budget
        copied = traffic.storer.take_copied()
        if copied:
            self._short_since = None
        next_ones = list(itertools.islice(waiting, _LOOK_AHEAD))
        if self.off_because:
            _pass_by(next_ones, self.off_because)
        budget.begin_poll(is_idle=is_idle, num_loads=traffic.loading.num_loads)
        traffic.loading.busy_s = budget.busy_s
        end_at = budget.end_at(sum(one.state is PrefetchState.UNASKED for one in next_ones), taken_in_s)
        if end_at is None:
            shared.has_unmatched = bool(next_ones or shared.looking)
            return copied
        # A prompt that lacks blocks for its load gets more of them after this, so matching must not take long.
        self._match_until(next_ones, end_at, is_idle=is_idle and not shared.growing)
        budget.end_poll()
        return copied

    def _match_until(self, waiting: Collection[Prefetch], end_at: float, *, is_idle: bool) -> None:
        """Match at least one piece; another if it would end in time, should it take as long as the one before."""
        shared, clock = self._shared, self._clock
        shared.has_unmatched = False
        piece_at = clock()
        for prefetch in list(shared.looking):
            while not shared.has_unmatched and prefetch.look_further(is_idle=is_idle):
                piece_at, before_at = clock(), piece_at
                shared.has_unmatched = 2 * piece_at - before_at >= end_at
                if not prefetch.has_more:
                    break
        for prefetch in waiting:
            while prefetch.state is PrefetchState.UNASKED:
                if shared.has_unmatched:
                    return
                prefetch.ask(is_idle=is_idle)
                match = prefetch.match
                may_stop = not is_idle or (match is not None and (match.is_matching or bool(match.spans)))
                piece_at, before_at = clock(), piece_at
                shared.has_unmatched = may_stop and 2 * piece_at - before_at >= end_at
        shared.has_unmatched = any(prefetch.has_more for prefetch in shared.looking)

    @property
    def has_unmatched(self) -> bool:
        """Whatever the last step is, the next one should follow at once: more can be loaded beside it."""
        return self._shared.has_unmatched

    # --- room ------------------------------------------------------------------------------------------------------

    def may_wait_for_room(self) -> bool:
        """Blocks are being copied away, and have not been for long: they will come back by themselves."""
        storer = self.traffic.storer
        if not storer.has_stores:
            self._short_since = None
            return False
        storer.send(is_last=True)
        now = self._clock()
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since > _PATIENCE_S:
            storer.hurry()
        return True

    # --- steps -----------------------------------------------------------------------------------------------------

    @property
    def has_arrivals(self) -> bool:
        """The next step waits for copies that are in flight."""
        return bool(self._shared.arrivals)

    def take_arrivals(self) -> list[Copies]:
        arrivals, self._shared.arrivals = self._shared.arrivals, []
        return arrivals

    def note_step(self, copied_ids: Iterable[int], *, is_full: bool) -> None:
        """A step was handed to the device, with copies among `copied_ids`; `is_full`: no room for another token."""
        shared, marks = self._shared, self.traffic.marks
        shared.budget.is_full = is_full
        marks.note_step()
        for block_id in copied_ids:
            shared.last_steps[block_id] = marks.num_steps

    # --- storing ---------------------------------------------------------------------------------------------------

    def send(self, *, is_last: bool = False) -> None:
        """Call at least once per step; `is_last` if no step follows for now."""
        self.traffic.storer.send(is_last=is_last)

    @property
    def has_stores(self) -> bool:
        """Blocks are held for stores."""
        return self.traffic.storer.has_stores

    def note(self, explanation: Explanation) -> None:
        """Report to the cache server why a match ended."""
        self.traffic.storer.note(explanation)

    def compute_s(self, num_tokens: int) -> float | None:
        """Measured time to compute the first `num_tokens` of a prompt; None while it is unknown."""
        return self.traffic.decision.tokens_s(num_tokens)

    # --- waiting and ending ----------------------------------------------------------------------------------------

    @property
    def is_foreign(self) -> bool:
        """This process was forked from the one that has the threads and the memory."""
        return self.traffic.is_foreign

    @property
    def registries(self) -> Sequence[CollectorRegistry]:
        """The registries with the tiers' metrics."""
        return [self.traffic.hierarchy.metrics.registry]

    def wake(self) -> None:
        """From any thread: end a `wait`."""
        self.traffic.wake()

    def wait(self, timeout_s: float) -> None:
        """Wait until something has happened."""
        self.traffic.wait(timeout_s)

    def give_way(self, *, is_idle: bool) -> None:
        """Call between two polls without a step."""
        self.traffic.give_way(is_idle=is_idle)

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything offered so far is stored or dropped. False on timeout."""
        return self.traffic.settle(timeout_s)

    def start_over(self) -> None:
        """After a failure: no copy touches the device's blocks any longer, and all prompts so far are forgotten."""
        self.traffic.drain()
        self._begin_anew()

    def close(self) -> None:
        self.traffic.close()


def _pass_by(waiting: Iterable[Prefetch], reason: str) -> None:
    """Skip the tiers for the waiting prompts, for a `reason` that their explanations give."""
    for prefetch in waiting:
        if prefetch.state is PrefetchState.UNASKED:
            if prefetch.ending is None:
                prefetch.ending = MatchEnding(0, MatchEnd.TIER_DOWN, "", f"it was not asked: {reason}")
            prefetch.finish()


class NoTransfer:
    """Stands in for `Transfer` if there are no tiers below the device."""

    has_tiers = False
    off_because = ""
    traffic: Traffic | None = None
    has_unmatched = False
    has_arrivals = False
    has_stores = False
    is_foreign = False
    registries: Sequence[CollectorRegistry] = ()
    _prefetch = NoPrefetch()

    def begin(self, blocks: PromptBlocks) -> Prefetch:
        return self._prefetch

    def poll(self, waiting: Iterable[Prefetch], *, is_idle: bool, taken_in_s: float) -> list[DeviceLease]:
        return []

    def may_wait_for_room(self) -> bool:
        return False

    def take_arrivals(self) -> list[Copies]:
        return []

    def note_step(self, copied_ids: Iterable[int], *, is_full: bool) -> None:
        pass

    def send(self, *, is_last: bool = False) -> None:
        pass

    def note(self, explanation: Explanation) -> None:
        pass

    def compute_s(self, num_tokens: int) -> float | None:
        return None

    def wake(self) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass

    def give_way(self, *, is_idle: bool) -> None:
        pass

    def settle(self, timeout_s: float = 10.0) -> bool:
        return True

    def start_over(self) -> None:
        pass

    def close(self) -> None:
        pass
