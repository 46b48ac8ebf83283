"""In which order several workers get a run's tests: each begins with its share of the slow ones.

Workers get equal parts of the list, and one that is done takes from the end of another's part. A slow test that begins
last would keep one worker busy while the others have nothing left to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

Test = TypeVar("Test")


def dealt(
    tests: Sequence[Test], num_workers: int, module_of: Callable[[Test], str], is_slow: Callable[[Test], bool]
) -> list[Test]:
    """All of `tests`, modules undivided: as many parts as workers, about equally long, slow modules first in each."""
    modules = [list(of_one) for _, of_one in itertools.groupby(tests, key=module_of)]
    modules.sort(key=lambda module: not is_slow(module[0]))
    parts: list[list[Test]] = [[] for _ in range(num_workers)]
    for module in modules:
        min(parts, key=len).extend(module)
    return list(itertools.chain.from_iterable(parts))
