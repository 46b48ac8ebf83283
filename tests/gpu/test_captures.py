"""Graphs are captured while an arena is registered with CUDA, and while it is let go."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvtier.memory.cuda import Registration, load_cudart
from kvtier.memory.mapped import MappedArena

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_NUM_STARTS = 10
_LARGEST_BYTES = 64 << 30
_MEMORY_SHARE = 0.6
_LIMIT_S = 240.0
_NUM_ADDITIONS = 200


def _arena_bytes() -> int:
    """64 GiB, or most of what this machine has."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert available is not None
    return max(1, min(_LARGEST_BYTES, int(int(available[1]) * 1024 * _MEMORY_SHARE)) >> 30) << 30


def _capture(numbers: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture like engines, in the strictest mode, which forbids unsafe calls to other threads."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        total = numbers
        for _ in range(_NUM_ADDITIONS):
            total = total + 1
    return graph, total


def _capture_until(is_over: Callable[[], bool], numbers: torch.Tensor) -> int:
    """Graphs that were captured before `is_over`; the last of them is run."""
    num_before, deadline = 0, time.monotonic() + _LIMIT_S
    while True:
        graph, total = _capture(numbers)
        if is_over() or time.monotonic() > deadline:
            graph.replay()
            assert total.eq(_NUM_ADDITIONS).all()
            return num_before
        num_before += 1


@pytest.mark.timeout(600)
def test_ten_engines_in_a_row_capture_graphs_while_memory_is_registered_and_let_go() -> None:
    cudart = load_cudart((int(torch.version.cuda.split(".")[0]),))
    device = torch.cuda.current_device()
    numbers = torch.zeros(1024, device=f"cuda:{device}")
    with (
        contextlib.closing(MappedArena.create(_arena_bytes())) as arena,
        ThreadPoolExecutor(1, initializer=cudart.set_device, initargs=(device,)) as thread,
    ):
        for _ in range(_NUM_STARTS):
            registration = Registration(arena, cudart, device)
            num_beside = _capture_until(functools.partial(registration.wait, 0), numbers)
            assert registration.is_complete
            assert num_beside > 0
            closing = thread.submit(registration.close)
            _capture_until(closing.done, numbers)
            closing.result(_LIMIT_S)
