"""Kernels that start while the one before them in the stream ends, and may then fetch what no kernel writes: weights.

The law: whoever was launched so waits before it reads or writes anything else. `wait` returns when the kernel before
has ended, and that one has waited itself, so nothing that was launched earlier runs any more.
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
    """As GPUs of the Hopper generation and later can. Those also have the instruction of `fetch_ahead`."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (9, 0))


def launch_options(device: torch.device, *, is_wanted: bool) -> dict[str, bool]:
    """For a kernel with an argument OVERLAPS."""
    return {"OVERLAPS": True, "launch_pdl": True} if is_wanted and can_overlap(device) else {"OVERLAPS": False}


@triton.jit
def wait(OVERLAPS: tl.constexpr):
    """Let the next kernel start, if it was launched so, and wait until the one before has ended."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch_ahead(row_ptrs, begin, SIZE: tl.constexpr, AHEAD: tl.constexpr):
    """AHEAD bytes (256 times a power of two, or none) of rows of SIZE numbers are on their way into the L2 cache."""
    NUMBER_BYTES: tl.constexpr = row_ptrs.dtype.element_ty.primitive_bitwidth // 8
    PIECE: tl.constexpr = 256 // NUMBER_BYTES
    if AHEAD > 0 and SIZE >= PIECE and SIZE * NUMBER_BYTES % 16 == 0:
        places = tl.minimum(begin + tl.arange(0, AHEAD // 256) * PIECE, SIZE - PIECE)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0;",
            "=r,l",
            [(row_ptrs + places[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
