"""Python's garbage collector, run when it suits the engine: while the device computes, not when tokens are due."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


def collect_young() -> None:
    """Collect when generation 0 is a quarter full: each pause is a quarter as long.

    Survivors become old objects, so Python has no middle generation to scan.
    """
    threshold = gc.get_threshold()[0]
    if gc.isenabled() and threshold and 4 * gc.get_count()[0] >= threshold:
        gc.collect(1)


@contextlib.contextmanager
def keeping_all() -> Iterator[None]:
    """Exempt all current objects, which are to stay, from collection until the end of the scope."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
