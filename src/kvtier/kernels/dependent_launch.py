"""Kernels that start while the one before them in the stream ends, and may then fetch what no kernel writes: weights.

The law: whoever was launched so waits before it reads or writes anything else. `wait` returns when the kernel before
has ended, and that one has waited itself, so nothing that was launched earlier runs any more. Attention may look up
what the step was given, too: the kernel before it lets it start when it has waited itself.
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
    """As GPUs of the Hopper generation and later can."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (9, 0))


def launch_options(device: torch.device, *, is_wanted: bool) -> dict[str, bool]:
    """For a kernel with an argument OVERLAPS."""
    return {"OVERLAPS": True, "launch_pdl": True} if is_wanted and can_overlap(device) else {"OVERLAPS": False}


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """From now on the next kernel may start, if it was launched so."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAPS: tl.constexpr):
    """Wait until the kernel before has ended."""
    if OVERLAPS:
        gdc_wait()
