"""Which cases of a parametrized test a short run has: a sample that is the same every time.

A case is what it takes from each parameter, by a number that stands for the value.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Case = Mapping[str, int]


def every_nth(cases: Sequence[Case], n: int) -> set[int]:
    """Positions of the first case and of every `n`-th after it."""
    return set(range(0, len(cases), n))


def covering(cases: Sequence[Case], together: int) -> set[int]:
    """Positions of cases in which all that occurs occurs: each value, or `together` = 2, each pair of values."""
    parts = [set(itertools.combinations(sorted(case.items()), min(together, len(case)))) for case in cases]
    left = set().union(*parts)
    chosen = set()
    while left:
        best = max(range(len(cases)), key=lambda position: len(left & parts[position]))
        left -= parts[best]
        chosen.add(best)
    return chosen
