"""Runs files of cases for Triton kernels under a pytest of their own, in the interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).parents[2]


def run_cases(files: Iterable[Path], share: str, config: pytest.Config) -> None:
    """Those of the cases that this run has, and of them the share `I/N`. A failure is told with all the output."""
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    options = ["-p", "no:xdist", "--cases", config.getoption("cases"), "--share", share, "--durations", "10"]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", *options, *map(str, files)],
        cwd=_ROOT,
        env={**os.environ, **interpret},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout + done.stderr
