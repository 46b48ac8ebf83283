"""Runs the cases of the Triton kernels in a process of its own.

Triton decides at its import whether to interpret kernels, which a machine without a GPU needs. Other tests may have
imported it before, as transformers does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NAMES = ("triton_cases.py", "elementwise_cases.py", "product_cases.py", "host_copy_cases.py", "argmax_cases.py")
CASES = [Path(__file__).with_name(name) for name in NAMES]
REPOSITORY = Path(__file__).parents[3]


@pytest.mark.timeout(300)
def test_triton_kernels_agree_with_their_twins() -> None:
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *map(str, CASES)]

    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **interpret}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
