"""Common to products of a few tokens: parts of a sum, added up by the program that finishes last.

A product of few tokens is a stream of weights, and fills the GPU only if there are several programs for each
multiprocessor. Layers with few outputs have too few tiles for that, so their inputs are split among programs. The last
one of a tile to finish adds the parts up in a fixed order: the result does not depend on timing, as it would with
atomic additions, and no second kernel has to be launched, which costs more than the additions.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MIN_COLUMNS = 32
"""The minimum number of outputs of a tile."""


def make_counters(outputs: int, device: torch.device) -> torch.Tensor:
    """One for each tile of a layer, at zero, where every kernel leaves them. Belongs to one layer.

    Make it outside of a graph's capture, and do not use it in two kernels at a time.
    """
    return torch.zeros(triton.cdiv(outputs, _MIN_COLUMNS), dtype=torch.int32, device=device)


def make_parts(*, num_tiles: int, splits: int, rows: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Room for the parts of the sums of all tiles."""
    return torch.empty(num_tiles * splits * rows * tokens if splits > 1 else 1, dtype=torch.float32, device=device)


@triton.jit
def joined(
    part,
    parts_ptr,
    counters_ptr,
    num_tokens,
    tile,
    split,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The sum of all parts (ROWS, TOKENS) of `tile`, and the tokens this program owns: all or none."""
    if SPLITS == 1:
        return part, num_tokens
    else:
        tokens = tl.arange(0, TOKENS)[None, :]
        places = tile * (SPLITS * ROWS * TOKENS) + tl.arange(0, ROWS)[:, None] + tokens * ROWS
        tl.store(parts_ptr + split * (ROWS * TOKENS) + places, part, mask=tokens < num_tokens)
        tl.debug_barrier()  # all threads have stored before one of them counts
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        num_joined = tl.where(is_last, num_tokens, 0)
        total = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
        AT_ONCE: tl.constexpr = max(8192 // (ROWS * TOKENS), 1)  # as many as registers are free for
        for first in range(0, SPLITS, AT_ONCE):
            for other in tl.static_range(AT_ONCE):
                num_read = tl.where(first + other < SPLITS, num_joined, 0)
                # Bypass the first-level cache, which may hold data from before another multiprocessor wrote it.
                total += tl.load(
                    parts_ptr + (first + other) * (ROWS * TOKENS) + places,
                    mask=tokens < num_read,
                    other=0.0,
                    cache_modifier=".cg",
                )
        tl.store(counters_ptr + tile, 0, mask=is_last)
        return total, num_joined
