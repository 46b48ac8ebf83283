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


def run_cases(files: Iterable[Path], number: int, num_shares: int, config: pytest.Config) -> None:
    """A share of the cases: of an eighth of the sample in the short run, and of all in the others.

    A failure is told with all the output.
    """
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    is_short = config.getoption("cases") == "sample"
    cases, share = ("sample", f"{number}/{8 * num_shares}") if is_short else ("all", f"{number}/{num_shares}")
    options = ["-p", "no:xdist", "--cases", cases, "--share", share, "--durations", "10"]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", *options, *map(str, files)],
        cwd=_ROOT,
        env={**os.environ, **interpret},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout + done.stderr
