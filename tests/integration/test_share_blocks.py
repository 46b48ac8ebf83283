"""examples/share_blocks.py: one process finds, byte for byte, what another one stored."""

from __future__ import annotations

import subprocess
import sys

from tests.support.document_code import ROOT
from tests.support.waiting import LIMIT_S


def test_the_reader_finds_the_blocks_of_the_writer() -> None:
    command = [sys.executable, "-m", "examples.share_blocks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert done.returncode == 0, done.stderr
    assert "256 blocks" in done.stdout
