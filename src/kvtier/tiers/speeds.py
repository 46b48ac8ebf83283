"""How fast the device computes prompts and how fast each tier delivers them, as measured. Thread-safe, no torch.

Both are straight lines: seconds = fixed + slopes * sizes, fitted to the medians of the last few measurements of each
size, and then scaled to meet the median of the size nearest to the requested one. So a thousand small steps do not
change the estimate for large ones, and a step that was held up does not change the estimate for others.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_NUM_KEPT = 5
_AGED = 0.97
_ENOUGH_TOKENS = 256
"""A measured step of this many tokens says how long any more take; the time of a few tokens is mostly a step's own."""
_LEAST_WEIGHT = 1e-3
"""A size that is no longer measured loses weight with every other measurement, down to this."""

_SMALL = 0.02
_RIDGE = 1e-12
_FIXED_RIDGE = 1e-7
"""The fixed part, the first feature, has the larger ridge: with a single measured size, all time counts as slope."""


@dataclass(slots=True)
class _Size:
    """The last measurements at about one size: features and seconds."""

    measured: deque[tuple[Sequence[float], float]]
    last_number: int

    def median(self) -> tuple[Sequence[float], float]:
        """The median by seconds relative to size, so that a measurement that was held up does not count."""
        ordered = sorted(self.measured, key=lambda one: one[1] / (_SMALL + sum(one[0][1:])))
        return ordered[(len(ordered) - 1) // 2]


class Fit:
    """Seconds as a sum of features with coefficients that are never negative, by least squares.

    The first feature is always 1. Errors are relative to the measured size, not to its seconds: a size that has become
    slow must not count less for that.
    """

    def __init__(self, num_features: int) -> None:
        self._num_features = num_features
        self._sizes: dict[tuple[int, ...], _Size] = {}
        self._coefficients: list[float] | None = None
        self._num_measured = 0

    @property
    def is_known(self) -> bool:
        return bool(self._sizes)

    def note(self, features: Sequence[float], seconds: float) -> None:
        self._num_measured += 1
        size = self._sizes.setdefault(_key(features), _Size(deque(maxlen=_NUM_KEPT), 0))
        size.measured.append((features, seconds))
        size.last_number = self._num_measured
        self._coefficients = None

    def seconds(self, features: Sequence[float]) -> float | None:
        """The estimate for `features`; None before the first measurement."""
        if not self._sizes:
            return None
        nearest = self._nearest(features)
        measured_features, measured_s = nearest.median()
        if measured_features == features:  # the scaled line meets it
            return measured_s
        line_s = self._line(measured_features)
        return self._line(features) * (measured_s / line_s if line_s > 0 else 1.0)

    def fixed_s(self) -> float:
        """The fixed part of the line."""
        return self._line((1.0, *([0.0] * (self._num_features - 1)))) if self._sizes else 0.0

    def _line(self, features: Sequence[float]) -> float:
        if self._coefficients is None:
            self._coefficients = self._solve()
        return sum(coefficient * feature for coefficient, feature in zip(self._coefficients, features, strict=True))

    def _nearest(self, features: Sequence[float]) -> _Size:
        key = _key(features)
        known = self._sizes.get(key)
        if known is not None:
            return known
        return self._sizes[min(self._sizes, key=lambda other: sum(abs(a - b) for a, b in zip(key, other, strict=True)))]

    def _solve(self) -> list[float]:
        """Solve, leaving out the feature with the most negative coefficient until no coefficient is negative."""
        products, targets = self._sums()
        trace = sum(products[place][place] for place in range(self._num_features))
        used = list(range(self._num_features))
        while True:
            matrix = [[products[row][column] for column in used] for row in used]
            for place, feature in enumerate(used):
                matrix[place][place] += trace * (_RIDGE if feature else _FIXED_RIDGE)
            solution = _solve_linear(matrix, [targets[row] for row in used])
            lowest = min(range(len(used)), key=solution.__getitem__)
            if solution[lowest] >= 0 or len(used) == 1:
                found = [0.0] * self._num_features
                for place, feature in enumerate(used):
                    found[feature] = max(0.0, solution[place])
                return found
            del used[lowest]

    def _sums(self) -> tuple[list[list[float]], list[float]]:
        """The matrix and the right side of the normal equations."""
        places = range(self._num_features)
        products = [[0.0] * self._num_features for _ in places]
        targets = [0.0] * self._num_features
        for size in self._sizes.values():
            features, seconds = size.median()
            age = max(_LEAST_WEIGHT, _AGED ** (self._num_measured - size.last_number))
            weight = age / (_SMALL + sum(features[1:])) ** 2
            for row in places:
                for column in places:
                    products[row][column] += weight * features[row] * features[column]
                targets[row] += weight * features[row] * seconds
        return products, targets


class Speeds:
    """The measured speeds on which the decision to load or to compute is based."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prefill = Fit(3)
        self._most_tokens = 0
        """Of a measured step."""
        self._tiers: dict[str, Fit] = {}

    def note_prefill(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Record a step that computed `chunks` of (first position, number of tokens)."""
        with self._lock:
            self._prefill.note(_prefill_features(chunks), seconds)
            self._most_tokens = max(self._most_tokens, sum(count for _, count in chunks))

    def knows_prefill(self, num_tokens: int) -> bool:
        """Whether `prefill_s` of a prompt's first `num_tokens` is more than a guess from much smaller steps."""
        return self._most_tokens >= min(num_tokens, _ENOUGH_TOKENS)

    def prefill_s(self, first: int, num_tokens: int, chunk_tokens: int) -> float | None:
        """The seconds that `num_tokens` from position `first` take, in steps of `chunk_tokens`; None if unknown."""
        total = 0.0
        with self._lock:
            if num_tokens > 0 and not self._prefill.is_known:
                return None
            while num_tokens > 0:
                count = min(num_tokens, chunk_tokens)
                total += self._prefill.seconds(_prefill_features([(first, count)])) or 0.0
                first, num_tokens = first + count, num_tokens - count
        return total

    def step_s(self) -> float:
        """The fixed time of a step, whatever it computes."""
        with self._lock:
            return self._prefill.fixed_s()

    def note_load(self, tier: str, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._tiers.setdefault(tier, Fit(2)).note(_load_features(nbytes), seconds)

    def load_s(self, tier: str, nbytes: int) -> float | None:
        """The seconds that a load of `nbytes` from `tier` takes; None before the first measurement."""
        with self._lock:
            fit = self._tiers.get(tier)
            return None if fit is None else fit.seconds(_load_features(nbytes))


def _key(features: Sequence[float]) -> tuple[int, ...]:
    """The class of a size: sizes within about a factor of two count as the same."""
    return tuple(math.frexp(feature)[1] for feature in features[1:])


def _prefill_features(chunks: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """1 for the step, its tokens, and the pairs of tokens in attention, in units that roughly match their costs."""
    tokens = sum(count for _, count in chunks)
    pairs = sum(count * (first + count / 2) for first, count in chunks)
    return 1.0, tokens / 1e3, pairs / 1e7


def _load_features(nbytes: int) -> tuple[float, float]:
    return 1.0, nbytes / 1e8


def _solve_linear(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Gaussian elimination with partial pivoting."""
    size = len(target)
    rows = [[*matrix[place], target[place]] for place in range(size)]
    for place in range(size):
        pivot = max(range(place, size), key=lambda row: abs(rows[row][place]))
        rows[place], rows[pivot] = rows[pivot], rows[place]
        for row in range(size):
            if row != place:
                factor = rows[row][place] / rows[place][place]
                rows[row] = [one - factor * other for one, other in zip(rows[row], rows[place], strict=True)]
    return [rows[place][size] / rows[place][place] for place in range(size)]
