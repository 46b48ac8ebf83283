"""A progress bar over prompts, for terminals. Without rich, or without a terminal, nothing is shown."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

try:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    _HAS_RICH = True
except ImportError:
    _HAS_RICH = False


@contextlib.contextmanager
def prompt_progress(num_prompts: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """A scope with a function to call with the number of prompts that were finished."""
    if not is_shown or not _HAS_RICH or not sys.stderr.isatty():
        yield lambda count: None
        return
    with Progress(
        TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), transient=True
    ) as bar:
        task = bar.add_task("", total=num_prompts)
        yield lambda count: bar.advance(task, count)
