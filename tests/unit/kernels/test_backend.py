"""Which kernels run, and that a machine without Triton runs the twins."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvtier.kernels.backend import Backend

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from kvtier.kernels.attention import attend
from kvtier.kernels.paged_batch import PagedArrays, PagedRow
batch = PagedArrays.lay_out([PagedRow([0], 1, 1)], block_tokens=4).upload(torch.device("cpu"))
one = torch.ones(1, 1, 8)
assert torch.equal(attend(one, one, one, torch.zeros(1, 1, 4, 16), batch, scale=1.0), one)
"""


def test_a_cpu_needs_no_triton() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)


def test_the_cpu_runs_the_twins() -> None:
    assert Backend.of(torch.device("cpu")) is Backend.TORCH


def test_a_gpu_runs_triton() -> None:
    pytest.importorskip("triton")

    assert Backend.of(torch.device("cuda")) is Backend.TRITON
