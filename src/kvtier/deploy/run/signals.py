"""Waits for signals that a part has blocked."""

from __future__ import annotations

import signal
from collections.abc import Sequence

_LOOK_S = 0.25


def is_signalled(signals: Sequence[signal.Signals]) -> bool:
    """Wait a moment for one of them. For a process that was stopped meanwhile, the answer is meaningless."""
    found = signal.sigtimedwait(signals, _LOOK_S)
    return found is not None and found.si_signo in signals
