"""Waiting for a condition. The limit is generous: it ends a test that hangs, and says nothing about speed."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 240.0
"""Less than the time limit of a test, so that a wait in vain says for what."""
CALL_S = 60.0
"""The deadline of a client's calls, which would be misses else when the machine is busy."""
FOR_EVER_S = 36_000.0
"""A deadline that a test does not live to see."""
_LOOK_S = 0.01


def wait_until(is_so: Callable[[], object], what: str = "", *, limit_s: float = LIMIT_S) -> None:
    """Poll until `is_so`. Raises `TimeoutError` with `what` was waited for."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so within {limit_s:g} s{what and ': '}{what}")
        time.sleep(_LOOK_S)


def wait_for_change(look: Callable[[], object], *, limit_s: float = LIMIT_S) -> None:
    """Wait until `look` sees something else than now."""
    before = look()
    wait_until(lambda: look() != before, f"something other than {before!r}", limit_s=limit_s)
