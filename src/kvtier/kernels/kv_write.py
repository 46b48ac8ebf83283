"""Puts a step's new keys and values into a layer's cache. `reference.write_kv` is the twin and says what holds."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.kernels import tuning


def write_kv(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As `reference.write_kv`. Waits for nothing; two tokens of one slot leave either of them, so give none twice."""
    num_tokens, kv_heads, head_dim = key.shape
    assert key.stride(-1) == value.stride(-1) == cache.stride(-1) == 1, "heads must be dense"
    assert (cache.shape[1], cache.shape[3]) == (kv_heads, 2 * head_dim), "the cache is of another shape"
    if num_tokens == 0:
        return
    _write_kernel[(num_tokens,)](
        key,
        value,
        cache,
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        KV_HEADS=kv_heads,
        HEADS=triton.next_power_of_2(kv_heads),
        HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim),
        BLOCK_TOKENS=cache.shape[2],
        num_warps=tuning.WRITE_WARPS,
        enable_fp_fusion=tuning.FUSE_MULTIPLY_ADD,
    )


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write_kernel(
    key_ptr,
    value_ptr,
    cache_ptr,
    slots_ptr,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    head_stride,
    token_stride,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """One program per token, all its heads. The arena exceeds 2**31 elements: every address is summed in 64 bits."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.arange(0, HEADS)[:, None].to(tl.int64)
    dims = tl.arange(0, DIM)[None, :]
    is_kept = (heads < KV_HEADS) & (dims < HEAD_DIM)
    key = tl.load(key_ptr + token * key_token_stride + heads * key_head_stride + dims, mask=is_kept)
    value = tl.load(value_ptr + token * value_token_stride + heads * value_head_stride + dims, mask=is_kept)
    place = cache_ptr + (slot // BLOCK_TOKENS) * block_stride + (slot % BLOCK_TOKENS) * token_stride
    place += heads * head_stride + dims
    tl.store(place, key.to(cache_ptr.dtype.element_ty), mask=is_kept)
    tl.store(place + HEAD_DIM, value.to(cache_ptr.dtype.element_ty), mask=is_kept)
