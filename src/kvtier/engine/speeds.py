"""How fast the device computes prompts and how fast each tier delivers them, as measured. Thread-safe, no torch.

Both are straight lines fitted to what was seen, newer measurements counting more: seconds = fixed + slope * size. A
small prompt is to be foretold as well as a large one, so what was small counts more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

_KEPT = 0.85
"""How much of its weight a measurement keeps when the next one comes."""

_SMALL = 0.02
_RIDGE = 1e-9
_FIXED_RIDGE = 1e-5
"""What was measured at one size only is taken for slope: the fixed part, the first feature, is what costs more."""


class Fit:
    """Seconds as a sum of features with coefficients that are never negative, by least squares.

    The first feature is always 1. An error counts relative to the size of what was measured, not to its seconds: what
    has become slow must not count less for it.
    """

    def __init__(self, num_features: int) -> None:
        self._num_features = num_features
        self._products = [[0.0] * num_features for _ in range(num_features)]
        self._targets = [0.0] * num_features
        self._coefficients: list[float] | None = None
        self.num_measured = 0

    def note(self, features: Sequence[float], seconds: float) -> None:
        weight = 1.0 / (_SMALL + sum(features[1:])) ** 2
        for row in range(self._num_features):
            for column in range(self._num_features):
                product = weight * features[row] * features[column]
                self._products[row][column] = _KEPT * self._products[row][column] + product
            self._targets[row] = _KEPT * self._targets[row] + weight * features[row] * seconds
        self._coefficients = None
        self.num_measured += 1

    def seconds(self, features: Sequence[float]) -> float | None:
        """None before anything was measured."""
        if not self.num_measured:
            return None
        if self._coefficients is None:
            self._coefficients = self._solve()
        return sum(coefficient * feature for coefficient, feature in zip(self._coefficients, features, strict=True))

    def _solve(self) -> list[float]:
        """Without the feature of the most negative coefficient, until none is negative."""
        trace = sum(self._products[place][place] for place in range(self._num_features))
        used = list(range(self._num_features))
        while used:
            matrix = [[self._products[row][column] for column in used] for row in used]
            for place, feature in enumerate(used):
                matrix[place][place] += trace * (_RIDGE if feature else _FIXED_RIDGE)
            solution = _solve_linear(matrix, [self._targets[row] for row in used])
            lowest = min(range(len(used)), key=solution.__getitem__)
            if solution[lowest] >= 0 or len(used) == 1:
                found = [0.0] * self._num_features
                for place, feature in enumerate(used):
                    found[feature] = max(0.0, solution[place])
                return found
            del used[lowest]
        raise AssertionError("a fit has at least one feature")


class Speeds:
    """What the decision to load or to compute rests on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prefill = Fit(3)
        self._tiers: dict[str, Fit] = {}

    def note_prefill(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step computed `chunks` of (first position, number of tokens)."""
        with self._lock:
            self._prefill.note(_prefill_features(chunks), seconds)

    def prefill_s(self, first: int, num_tokens: int, chunk_tokens: int) -> float | None:
        """How long `num_tokens` from position `first` take, in steps of `chunk_tokens`; None when nothing is known."""
        total = 0.0
        with self._lock:
            while num_tokens > 0:
                count = min(num_tokens, chunk_tokens)
                seconds = self._prefill.seconds(_prefill_features([(first, count)]))
                if seconds is None:
                    return None
                total += seconds
                first, num_tokens = first + count, num_tokens - count
        return total

    def step_s(self) -> float:
        """What a step costs whatever it computes."""
        with self._lock:
            return self._prefill.seconds((1.0, 0.0, 0.0)) or 0.0

    def note_load(self, tier: str, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._tiers.setdefault(tier, Fit(2)).note(_load_features(nbytes), seconds)

    def load_s(self, tier: str, nbytes: int) -> float | None:
        """How long a load of `nbytes` from `tier` takes; None when none was measured."""
        with self._lock:
            fit = self._tiers.get(tier)
            return None if fit is None else fit.seconds(_load_features(nbytes))


def _prefill_features(chunks: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """One for the step, the tokens, and the pairs of tokens that attention looks at, in units of about their cost."""
    tokens = sum(count for _, count in chunks)
    pairs = sum(count * (first + count / 2) for first, count in chunks)
    return 1.0, tokens / 1e3, pairs / 1e7


def _load_features(nbytes: int) -> tuple[float, float]:
    return 1.0, nbytes / 1e8


def _solve_linear(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Gauss with pivots."""
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
