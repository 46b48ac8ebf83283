"""Learns how long prompts wait until their next use, and what keeping one is therefore worth.

Gaps between uses are counted in buckets, each twice as wide as the one before, for each class of prompts: those never
used again so far, and those with gaps of about the same length. A class with few events leans on its neighbours, and
these lean on all classes together. The worth of keeping a block of some age is the best ratio, over all times to stop,
of the chance of a hit until then to the time that the block is kept for it: hits per second of one block's room.
"""

from __future__ import annotations

import itertools
import math

NEW_CLASS = 0
NUM_CLASSES = 24
NUM_BUCKETS = 40
FIRST_S = 0.05
_LOG2_FIRST = math.log2(FIRST_S)
_EDGES = [0.0] + [FIRST_S * 2.0**power for power in range(NUM_BUCKETS)]
_WIDTHS = [after - before for before, after in itertools.pairwise(_EDGES)]
_PRIOR = 8.0
"""The prior from more classes counts as much as this many gaps seen in fewer."""
_MAX_EVENTS = 10_000
"""Past this many events, counts are halved, so that old traffic is forgotten."""
_MIN_NEWS = 8
_frexp = math.frexp
_FORGOTTEN = 1e-6


def class_of(log2_gap: float) -> int:
    """The class of a prompt with gaps of about `2 ** log2_gap` seconds; each class has twice the gaps of the last."""
    return min(NUM_CLASSES - 1, 1 + max(0, int(log2_gap - _LOG2_FIRST)))


def bucket_of(age_s: float) -> int:
    bucket = _frexp(age_s / FIRST_S)[1]
    return bucket if 0 <= bucket < NUM_BUCKETS else 0 if bucket < 0 else NUM_BUCKETS - 1


class ReuseModel:
    """Learns from each gap that ended in a use, and from each history that was forgotten. Takes a few KiB."""

    def __init__(self) -> None:
        self._reused = [[0.0] * NUM_BUCKETS for _ in range(NUM_CLASSES)]
        self._ended = [[0.0] * NUM_BUCKETS for _ in range(NUM_CLASSES)]
        self._worths = [[0.0] * NUM_BUCKETS for _ in range(NUM_CLASSES)]
        self._news = [0.0] * NUM_CLASSES
        self._limits = [1.0] * NUM_CLASSES
        self._stale: set[int] = set()
        self._num_events = 0.0

    def reused(self, gap_class: int, gap_s: float) -> None:
        bucket = bucket_of(gap_s)
        self._reused[gap_class][bucket] += 1
        self._end(gap_class, bucket)

    def given_up(self, gap_class: int, age_s: float) -> None:
        """A prompt was not requested again while its history was kept."""
        self._end(gap_class, bucket_of(age_s))

    def worth(self, gap_class: int, age_s: float) -> float:
        """Expected hits per second of a block of this class and age. Zero before anything was learned."""
        return self.worths_of(gap_class)[bucket_of(age_s)]

    def worths_of(self, gap_class: int) -> list[float]:
        """The worths of a class by the bucket of a block's age."""
        if gap_class in self._stale:
            self._refresh(gap_class)
        return self._worths[gap_class]

    def _end(self, gap_class: int, bucket: int) -> None:
        self._ended[gap_class][bucket] += 1
        self._news[gap_class] += 1
        if self._news[gap_class] >= self._limits[gap_class]:
            self._stale.add(gap_class)
        self._num_events += 1
        if self._num_events > _MAX_EVENTS:
            self._num_events /= 2
            for rows in (self._reused, self._ended):
                for row in rows:
                    row[:] = [count / 2 for count in row]

    def _refresh(self, gap_class: int) -> None:
        """Recompute the worths of a class: seldom enough to cost little, often enough to follow the traffic."""
        chances = self._chances(gap_class)
        self._worths[gap_class] = _best_ratios(chances)
        self._news[gap_class] = 0
        self._stale.discard(gap_class)
        self._limits[gap_class] = _MIN_NEWS + sum(self._ended[gap_class]) / 32

    def _chances(self, gap_class: int) -> list[float]:
        """For each bucket, the chance of a use within it, given that the wait has reached it."""
        chances = [0.0] * NUM_BUCKETS
        for first, end in ((0, NUM_CLASSES), _neighbours(gap_class), (gap_class, gap_class + 1)):
            reused = [sum(column) for column in zip(*self._reused[first:end], strict=True)]
            ended = [sum(column) for column in zip(*self._ended[first:end], strict=True)]
            at_risk = 0.0
            for bucket in range(NUM_BUCKETS - 1, -1, -1):
                at_risk += ended[bucket]
                chances[bucket] = (reused[bucket] + _PRIOR * chances[bucket]) / (at_risk + _PRIOR)
        return [min(0.999, chance) for chance in chances]


def _neighbours(gap_class: int) -> tuple[int, int]:
    """The range of a class and its neighbours; the class of prompts never used again has none."""
    if gap_class == NEW_CLASS:
        return NEW_CLASS, NEW_CLASS + 1
    return max(NEW_CLASS + 1, gap_class - 1), min(NUM_CLASSES, gap_class + 2)


def _best_ratios(chances: list[float]) -> list[float]:
    """For each bucket that a block's age may be in, hits over time if it is kept until the best bucket to stop."""
    last = max((bucket for bucket, chance in enumerate(chances) if chance > 0), default=-1)
    worths = [0.0] * NUM_BUCKETS
    for first in range(last + 1):
        waiting, hits, time_s, best = 1.0, 0.0, 0.0, 0.0
        for bucket in range(first, last + 1):
            hit = waiting * chances[bucket]
            hits += hit
            time_s += _WIDTHS[bucket] * (waiting - hit / 2)
            waiting -= hit
            best = max(best, hits / time_s)
            if waiting < _FORGOTTEN:
                break
        worths[first] = best
    return worths
