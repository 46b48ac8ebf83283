"""Threads that let another one of their process go first.

Python runs one thread at a time, and one that finds it taken, even for some microseconds, sleeps, and is woken a fifth
of a millisecond later. A thread that has to be on time cannot help that; the others can, if they do not begin anything
just then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_of_thread = threading.local()


def be_courteous(let_pass: Callable[[], None] | None) -> None:
    """From now on the calling thread calls `let_pass`, which may wait for a moment, wherever it can `give_way`."""
    _of_thread.let_pass = let_pass


def courtesy() -> Callable[[], None] | None:
    """What the calling thread has said, for those that work for it."""
    let_pass: Callable[[], None] | None = getattr(_of_thread, "let_pass", None)
    return let_pass


def give_way() -> None:
    """Called where a thread has just waited for somebody, or is about to compute. Without locks that others need."""
    let_pass = courtesy()
    if let_pass is not None:
        let_pass()
