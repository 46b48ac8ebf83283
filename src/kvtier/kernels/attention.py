"""The entry of the kernels: one call per layer writes the step's KV and attends over the cache."""

from __future__ import annotations

import torch

from kvtier.kernels import reference, tuning
from kvtier.kernels.backend import (
    Backend,
    gathered_attention_of,
    paged_attention_of,
    rotate_and_write_of,
    write_kv_of,
)
from kvtier.kernels.paged_batch import PagedBatch
from kvtier.kernels.rotation import Rotation


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    rotation: Rotation | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write `key` and `value` of the batch's tokens into a layer's `cache`, then attend; into `out`, or a new tensor.

    `query` is `(tokens, heads, head_dim)`, `key` and `value` are `(tokens, kv_heads, head_dim)`; each may be a part
    of a larger tensor as long as its last dimension is dense. With a `rotation`, query and key are rotated first, and
    what was in `query` may be gone. On a GPU it never waits, so a graph can contain it.
    """
    if rotation is None:
        write_kv_of(batch.backend)(key, value, cache, batch.slots)
    else:
        query = rotate_and_write_of(batch.backend)(query, key, value, cache, batch.slots, rotation)
    if batch.backend is Backend.TORCH:
        return reference.attend_groups(query, cache, batch.plan(window), scale=scale, out=out)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    first_prefill = batch.num_decodes
    if first_prefill:
        rows = slice(0, first_prefill)
        _attend_rows(query, cache, batch, rows, 1, scale=scale, window=window, shares=batch.shares, out=out)
    if first_prefill < batch.num_rows:
        rows = slice(first_prefill, batch.num_rows)
        if window is None and _gathers(cache, batch):
            gathered_attention_of(batch.backend)(
                query,
                cache,
                batch.block_tables[rows],
                batch.query_starts[rows.start :],
                batch.kv_lengths[rows],
                batch.gather_starts,
                num_gathered_tokens=batch.num_gathered_tokens,
                scale=scale,
                out=out,
            )
            return out
        _attend_rows(query, cache, batch, rows, batch.max_query_tokens, scale=scale, window=window, out=out)
    return out


def _gathers(cache: torch.Tensor, batch: PagedBatch) -> bool:
    _, kv_heads, _, kv_dim = cache.shape
    itemsize = cache.element_size()
    return tuning.gathers(
        head_dim=kv_dim // 2,
        itemsize=itemsize,
        gathered_bytes=batch.num_gathered_tokens * kv_heads * kv_dim * itemsize,
        queries_per_key=batch.queries_per_key,
    )


def _attend_rows(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: PagedBatch,
    rows: slice,
    max_query_tokens: int,
    *,
    scale: float,
    window: int | None,
    shares: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """A slice of the rows; their starts still count from the first token of the batch."""
    paged_attention_of(batch.backend)(
        query,
        cache,
        batch.block_tables[rows],
        batch.query_starts[rows.start : rows.stop + 1],
        batch.kv_lengths[rows],
        batch.counters,
        scale=scale,
        window=window,
        max_query_tokens=max_query_tokens,
        shares=shares,
        out=out,
    )
