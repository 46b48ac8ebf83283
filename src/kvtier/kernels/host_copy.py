"""Copies a few kilobytes between the device and pinned host memory by a kernel, which reads and writes it itself.

The device's copy engines take one copy after the other, also of different streams: behind the blocks of a tier a copy
of a few numbers would wait for milliseconds, and the step that needs them with it. A kernel waits for its own stream
alone.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = 2048
_WARPS = 8


def copy_words(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy dense int32 words, as many as `source` has. Either side may be pinned memory of the host.

    It is ordered in the current stream, and nothing here waits. The host sees what was written once an event that was
    recorded behind it is over; until then it must leave both sides alone.
    """
    num_words = source.numel()
    assert source.dtype == target.dtype == torch.int32, "words are int32"
    assert source.is_contiguous(), "words must be dense"
    assert target.is_contiguous(), "words must be dense"
    assert num_words <= target.numel(), "there is no room for so many words"
    if num_words:
        _copy_kernel[(triton.cdiv(num_words, _WORDS),)](source, target, num_words, WORDS=_WORDS, num_warps=_WARPS)


@triton.jit(do_not_specialize=["num_words"])
def _copy_kernel(source_ptr, target_ptr, num_words, WORDS: tl.constexpr):
    places = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    is_there = places < num_words
    # The host writes this memory between two launches: no cache may answer for it.
    words = tl.load(source_ptr + places, mask=is_there, cache_modifier=".cv")
    tl.store(target_ptr + places, words, mask=is_there)
