"""Runs the cases of the Triton kernels in processes of their own.

Triton decides at its import whether to interpret kernels, which a machine without a GPU needs. Other tests may have
imported it before, as transformers does. Several processes, so that the workers of a run can share the cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel_cases import run_cases

NAMES = (
    "triton_cases.py", "elementwise_cases.py", "product_cases.py", "host_copy_cases.py", "argmax_cases.py",
    "token_mask_cases.py",
)  # fmt: skip
CASES = [Path(__file__).with_name(name) for name in NAMES]
NUM_SHARES = 3
LIMIT_S = 3600
"""Several minutes of computing, which other programs can make much longer."""


@pytest.mark.scaled
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("share", range(1, NUM_SHARES + 1))
def test_triton_kernels_agree_with_their_twins(share: int, pytestconfig: pytest.Config) -> None:
    run_cases(CASES, share, NUM_SHARES, pytestconfig)
