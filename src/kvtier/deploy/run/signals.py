"""Signals that a part has blocked, and waits for."""

from __future__ import annotations

import signal
from collections.abc import Sequence

_LOOK_S = 0.25


def is_signalled(signals: Sequence[signal.Signals]) -> bool:
    """Wait a moment for one of them. A process that was stopped meanwhile gets an answer without meaning."""
    found = signal.sigtimedwait(signals, _LOOK_S)
    return found is not None and found.si_signo in signals
