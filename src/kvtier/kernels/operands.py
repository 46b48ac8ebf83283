"""What the device's matrix products take: the dtype of their operands, and the memory that one program may share."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import functools
import sys

import torch
import triton
import triton.language as tl


def operand(dtype: torch.dtype) -> tl.dtype:
    """The dtype of the matrix products. Triton's interpreter would multiply bfloat16 as whole numbers."""
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


@functools.cache
def shared_bytes_of(device: torch.device) -> int:
    """The shared memory that one program may take; unlimited if Triton interprets."""
    if device.type != "cuda":
        return sys.maxsize
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
