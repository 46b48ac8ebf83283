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
def can_launch_dependent(device: torch.device) -> bool:
    """Whether the GPU supports this: Hopper and later."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (9, 0))


def launch_options(device: torch.device, *, is_wanted: bool) -> dict[str, bool]:
    """For a kernel with an argument DEPENDENT_LAUNCH."""
    if is_wanted and can_launch_dependent(device):
        return {"DEPENDENT_LAUNCH": True, "launch_pdl": True}
    return {"DEPENDENT_LAUNCH": False}


@triton.jit
def let_next_start(DEPENDENT_LAUNCH: tl.constexpr):
    """Let the next kernel start, if it is a dependent launch."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()


@triton.jit
def wait(DEPENDENT_LAUNCH: tl.constexpr):
    """Wait until the previous kernel has ended."""
    if DEPENDENT_LAUNCH:
        gdc_wait()
