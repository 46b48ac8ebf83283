"""Kernels that start while the one before them in the stream ends, and may fetch data that no kernel writes: weights.

The rule: a kernel launched this way waits before it reads or writes anything else. `wait` returns when the previous
kernel has ended, which has waited itself, so no earlier kernel is still running. Attention may also read the step's
inputs: the kernel before it releases it only after its own wait.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether the GPU supports this: Hopper and later."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (9, 0))


def launch_options(device: torch.device, *, is_wanted: bool) -> dict[str, bool]:
    """For a kernel with an argument OVERLAPS."""
    return {"OVERLAPS": True, "launch_pdl": True} if is_wanted and can_overlap(device) else {"OVERLAPS": False}


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """Let the next kernel start, if it is a dependent launch."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAPS: tl.constexpr):
    """Wait until the previous kernel has ended."""
    if OVERLAPS:
        gdc_wait()
