"""Puts a step's new keys and values into a layer's cache, rotated on the way. The twins are in `reference`."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvtier.kernels import dependent_launch, tuning
from kvtier.kernels.rotation import Rotation

_HEADS_AT_ONCE = 8


def write_kv(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Like `reference.write_kv`. Never waits; of two tokens in one slot either may win, so give none twice."""
    _write(None, key, value, cache, slots, None)


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    rotation: Rotation,
) -> torch.Tensor:
    """Like `reference.rotate_and_write` and `write_kv`. `query` itself is returned, rotated."""
    rotary_dim, head_dim = rotation.cos_sin.shape[1], query.shape[2]
    assert query.stride(-1) == rotation.cos_sin.stride(-1) == 1, "the last dimension must be dense"
    assert rotation.norms is None or rotary_dim == head_dim, "heads that are normalised rotate whole"
    _write(query, key, value, cache, slots, rotation)
    return query


def _write(query, key, value, cache, slots, rotation) -> None:
    num_tokens, kv_heads, head_dim = key.shape
    assert key.stride(-1) == value.stride(-1) == cache.stride(-1) == 1, "heads must be dense"
    assert (cache.shape[1], cache.shape[3]) == (kv_heads, 2 * head_dim), "the cache is of another shape"
    if num_tokens == 0:
        return
    is_rotated = rotation is not None
    query = query if is_rotated else key
    query_heads = query.shape[1] if is_rotated else 0
    cos_sin = rotation.cos_sin if is_rotated else key
    rotary_dim = cos_sin.shape[1] if is_rotated else 0
    has_norms = is_rotated and rotation.norms is not None
    query_weight, key_weight = rotation.norms if has_norms else (key, key)
    num_groups = triton.cdiv(query_heads, _HEADS_AT_ONCE) + triton.cdiv(kv_heads, _HEADS_AT_ONCE)
    _write_kernel[(num_tokens, num_groups)](
        query,
        key,
        value,
        cache,
        slots,
        cos_sin,
        query_weight,
        key_weight,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        cos_sin.stride(0),
        rotation.eps if is_rotated else 0.0,
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        HEADS=_HEADS_AT_ONCE,
        HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim),
        PAIRS=rotary_dim // 2,
        COLUMNS=triton.next_power_of_2(max(rotary_dim // 2, 1)),
        IS_INTERLEAVED=is_rotated and rotation.is_interleaved,
        HAS_NORMS=has_norms,
        BLOCK_TOKENS=cache.shape[2],
        **dependent_launch.launch_options(key.device, is_wanted=tuning.DEPENDENT_ATTENTION),
        num_warps=tuning.WRITE_WARPS,
        enable_fp_fusion=tuning.FUSE_MULTIPLY_ADD,
    )


@triton.jit
def _pair_places(PAIRS: tl.constexpr, COLUMNS: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Offsets of the first and the second numbers of all pairs of a head."""
    pairs = tl.arange(0, COLUMNS)[None, :]
    if IS_INTERLEAVED:
        return 2 * pairs, 2 * pairs + 1
    else:
        return pairs, pairs + PAIRS


@triton.jit
def _rotated(
    head_ptrs,
    is_kept,
    weight_ptr,
    cos_sin_ptr,
    eps,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """The first and the second numbers of all pairs of some heads of one token, normalised and rotated."""
    dtype = head_ptrs.dtype.element_ty
    pairs = tl.arange(0, COLUMNS)[None, :]
    is_pair = pairs < PAIRS
    firsts, seconds = _pair_places(PAIRS, COLUMNS, IS_INTERLEAVED)
    first = tl.load(head_ptrs + firsts, mask=is_kept, other=0.0).to(tl.float32)
    second = tl.load(head_ptrs + seconds, mask=is_kept, other=0.0).to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * PAIRS) + eps)[:, None]
        first_weight = tl.load(weight_ptr + firsts, mask=is_pair, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + seconds, mask=is_pair, other=0.0).to(tl.float32)
        first = (first * scale * first_weight).to(dtype).to(tl.float32)
        second = (second * scale * second_weight).to(dtype).to(tl.float32)
    cos = tl.load(cos_sin_ptr + pairs, mask=is_pair, other=0.0)
    sin = tl.load(cos_sin_ptr + PAIRS + pairs, mask=is_pair, other=0.0)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cache_ptr,
    slots_ptr,
    cos_sin_ptr,
    query_weight_ptr,
    key_weight_ptr,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    head_stride,
    token_stride,
    cos_sin_stride,
    eps,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Some heads of one token: of the query, rotated in place, or of key and value, written to the cache.

    A thread loads both numbers of a pair and stores both, so it can work in place. The arena exceeds 2**31 elements:
    every address is summed in 64 bits.
    """
    QUERY_GROUPS: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()  # not earlier: the next kernel may read everything written before this one
    if QUERY_GROUPS > 0:
        cos_sin_ptr += token * cos_sin_stride
        is_pair = tl.arange(0, COLUMNS)[None, :] < PAIRS
        firsts, seconds = _pair_places(PAIRS, COLUMNS, IS_INTERLEAVED)
        if group < QUERY_GROUPS:
            query_heads = group * HEADS + tl.arange(0, HEADS)[:, None]
            query_ptrs = query_ptr + token * query_token_stride + query_heads * query_head_stride
            is_kept = (query_heads < QUERY_HEADS) & is_pair
            first, second = _rotated(
                query_ptrs, is_kept, query_weight_ptr, cos_sin_ptr, eps, PAIRS, COLUMNS, IS_INTERLEAVED, HAS_NORMS
            )
            tl.store(query_ptrs + firsts, first, mask=is_kept)
            tl.store(query_ptrs + seconds, second, mask=is_kept)
            return

    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    dtype = cache_ptr.dtype.element_ty
    heads = (group - QUERY_GROUPS) * HEADS + tl.arange(0, HEADS)[:, None].to(tl.int64)
    dims = tl.arange(0, DIM)[None, :]
    is_head = heads < KV_HEADS
    is_kept = is_head & (dims < HEAD_DIM)
    place = cache_ptr + (slot // BLOCK_TOKENS) * block_stride + (slot % BLOCK_TOKENS) * token_stride
    place += heads * head_stride
    key_ptrs = key_ptr + token * key_token_stride + heads * key_head_stride
    value_ptrs = value_ptr + token * value_token_stride + heads * value_head_stride
    tl.store(place + HEAD_DIM + dims, tl.load(value_ptrs + dims, mask=is_kept).to(dtype), mask=is_kept)
    if PAIRS > 0:
        is_rotated = is_head & is_pair
        first, second = _rotated(
            key_ptrs, is_rotated, key_weight_ptr, cos_sin_ptr, eps, PAIRS, COLUMNS, IS_INTERLEAVED, HAS_NORMS
        )
        tl.store(place + firsts, first.to(dtype), mask=is_rotated)
        tl.store(place + seconds, second.to(dtype), mask=is_rotated)
    if 2 * PAIRS < HEAD_DIM:
        is_left = is_kept & (dims >= 2 * PAIRS)
        tl.store(place + dims, tl.load(key_ptrs + dims, mask=is_left).to(dtype), mask=is_left)
