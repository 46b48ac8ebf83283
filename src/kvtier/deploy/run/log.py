"""The one log of a deployment: every line with the time and the part it comes from. One thread writes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TextIO

import click

from kvtier.observe.printable import printable

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_PROGRESS_EVERY_S = 2.0
_LONGEST_LINE = 1 << 16
_COLOURING = re.compile(r"\x1b\[[0-9;]*m")


class DeploymentLog:
    """Writes to `stream`; on a terminal with colours, and with progress on a line that is overwritten."""

    def __init__(self, stream: TextIO, parts: list[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._width = max(map(len, parts), default=0)
        self._colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(parts)}
        self._clock = clock
        self._progress_at: dict[str, float] = {}
        self._has_progress_line = False

    def line(self, part: str, text: str) -> None:
        """A line written by a part, or about one. It may contain clients' text, so control codes are removed."""
        self._write(f"{self._head(part)} {_shown(text)}\n")

    def progress(self, part: str, text: str, *, is_last: bool) -> None:
        """A part's progress. If lines cannot be overwritten, one is shown every two seconds."""
        if self._is_terminal and not is_last:
            self._write(f"{self._head(part)} {_shown(text)}", is_progress=True)
            return
        now = self._clock()
        if is_last or now - self._progress_at.get(part, float("-inf")) >= _PROGRESS_EVERY_S:
            self._progress_at[part] = now
            self.line(part, text)

    def plain(self, text: str) -> None:
        """A line without a part, for the summary."""
        self._write(text + "\n")

    def _head(self, part: str) -> str:
        name = f"{part:{self._width}}"
        if self._is_terminal:
            name = click.style(name, fg=self._colours.get(part, "white"))
        return f"{time.strftime('%H:%M:%S')} {name} |"

    def _write(self, text: str, *, is_progress: bool = False) -> None:
        if self._has_progress_line:
            text = "\r\x1b[K" + text
        self._has_progress_line = is_progress
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            pass  # its reader is gone; the deployment continues


def _shown(text: str) -> str:
    """Without the colours of a library's own log; tabs stay."""
    return "\t".join(printable(part, _LONGEST_LINE) for part in _COLOURING.sub("", text).split("\t"))
