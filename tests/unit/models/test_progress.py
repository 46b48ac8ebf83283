"""The bar over bytes shows on a terminal and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.models.progress import terminal_progress
from tests.support.waiting import LIMIT_S

CODE = """
from kvtier.models.progress import terminal_progress
with terminal_progress("Loading tiny", 1000) as advance:
    advance(400)
    advance(600)
"""


def test_without_a_terminal_nothing_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    with terminal_progress("Loading tiny", 1000) as advance:
        advance(1000)

    assert capfd.readouterr() == ("", "")


def test_on_a_terminal_the_bytes_are_counted(tmp_path: Path) -> None:
    screen, terminal = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-c", CODE],
            stderr=terminal,
            check=True,
            timeout=LIMIT_S,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        )
        shown = os.read(screen, 65536).decode()
    finally:
        os.close(screen)
        os.close(terminal)

    assert "Loading tiny" in shown
    assert "1000/1000 bytes" in shown.replace("1,000", "1000")
