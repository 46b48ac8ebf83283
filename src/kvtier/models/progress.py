"""Progress over bytes while weights load: a bar if stderr is a terminal and rich is installed, otherwise nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

try:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
except ImportError:  # without the extra `terminal`
    _HAS_RICH = False
else:
    _HAS_RICH = True

Advance = Callable[[int], object]
"""Called with the number of bytes done since the last call."""


@contextmanager
def terminal_progress(title: str, total_bytes: int) -> Iterator[Advance]:
    """A bar on stderr within the scope; it leaves no trace afterwards."""
    if not (_HAS_RICH and sys.stderr.isatty()):
        yield lambda nbytes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    bar = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes)
