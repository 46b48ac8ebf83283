"""How long matching may hold up a step, and how much of a prompt is hashed at a time. No torch.

Matching runs on the engine's thread between steps. Too much of it delays decodes; too little leaves the bus and the
device without work. Owned by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable

_SHARE = 0.25
_MAX_S = 0.05
"""Matching takes at most this share of the shorter of the last two steps, and never longer than `_MAX_S`. One of the
two may have been long for another reason, and the next one has to make up for it."""

_MANY_WAITING = 32
_MANY_SHARE = 0.75
"""With this many unmatched prompts, the device may soon run out of work, so the share is larger."""

_FEW_LOADS = 3
_FEW_SHARE = 0.5
"""With fewer loads in flight, and a hit for the last prompt, the bus may soon run out of work. The share is larger
then, and pieces are twice as large."""

PIECE_BLOCKS = 128
"""Blocks of a long prompt that are hashed at a time between steps. This takes a sixth to half of a millisecond."""

_EARLY_STEPS = 1.5
_MAX_EARLY_S = 0.01
"""A load's rest is in time for a step if it arrives during the step before, or the first half of its own: the last
layers arrive last. No step waits longer than `_MAX_EARLY_S`, however long the step before took."""


class MatchBudget:
    """Learns step times from the intervals between polls."""

    def __init__(self, clock: Callable[[], float], piece_blocks: int = PIECE_BLOCKS) -> None:
        self.clock = clock
        self.piece_blocks = piece_blocks
        self._polled_at = clock()
        self._step_s = 0.0
        """Time between the last two polls: about one step, while there is something to compute."""
        self._own_s = 0.0
        """`_step_s` without the time spent matching."""
        self._matched_s = 0.0
        """Time that the last poll spent matching."""
        self._is_put_off = False
        """The last poll matched nothing, since taking in prompts had used up its time; this one does match."""
        self._shortest_s = 0.0
        self.is_idle = False
        """At the last poll, nothing could be computed."""
        self.was_found = False
        """A tier that answers at once had a hit for the last prompt."""
        self.has_few_loads = False
        """The bus may soon be idle for lack of matches."""
        self.is_full = False
        """The last step had no room for another token: the next prompt waits for at least one more such step."""

    def begin_poll(self, *, is_idle: bool, num_loads: int) -> None:
        """If `is_idle`, nothing can be computed meanwhile."""
        now, polled_at = self.clock(), self._polled_at
        self._polled_at = now
        self._step_s = now - polled_at
        last_own_s, self._own_s = self._own_s, self._step_s - self._matched_s
        self._shortest_s = min(self._own_s, last_own_s)
        self.is_full = self.is_full and not is_idle
        self.is_idle = is_idle
        self.has_few_loads = self.was_found and num_loads < _FEW_LOADS

    @property
    def busy_s(self) -> float:
        """How long the device will compute for others before the next prompt's turn."""
        return self._step_s if self.is_full else 0.0

    def end_at(self, num_unmatched: int, taken_in_s: float) -> float | None:
        """When matching has to end; None to match nothing now, because prompts were taken in for `taken_in_s`.

        Never None for two polls in a row.
        """
        if self.is_idle:
            self._is_put_off = False
            return self._polled_at
        share = _FEW_SHARE if self.has_few_loads else _SHARE
        if num_unmatched >= _MANY_WAITING:
            share = _MANY_SHARE
        allowed_s = min(share * self._shortest_s, _MAX_S) - taken_in_s
        if allowed_s < 0 and not self._is_put_off:
            self._is_put_off, self._matched_s = True, 0.0
            return None
        self._is_put_off = False
        return self._polled_at + allowed_s

    def end_poll(self) -> None:
        """Matching for this poll is over."""
        self._matched_s = self.clock() - self._polled_at

    def next_piece(self, num_hashed: int, *, is_idle: bool, num_loads: int) -> int:
        """How many more blocks of a prompt to hash.

        If no step is held up, a few at first, so that a load begins; then as many as can be hashed while it arrives.
        """
        size = self.piece_blocks
        if is_idle:
            return 2 * num_hashed or (8 * size if num_loads else max(1, size // 2))
        return 2 * size if self.has_few_loads else size

    def is_in_time(self, left_s: float | None) -> bool:
        """Whether a load that arrives within `left_s` is in time for the next step."""
        return left_s is not None and left_s <= min(_EARLY_STEPS * self._step_s, _MAX_EARLY_S)
