"""Plain-torch twins of the kernels: the definition the Triton kernels are tested against, and the CPU engine's own.

A batch is planned once (`plan_rows`) and attended once per layer (`attend_groups`); `paged_attention` does both.
The plan reads lengths on the host, so the twins are for tensors on the CPU, or for checks on a GPU that may wait.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtier.kernels.rotation import Rotation, rotate


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of equal shape that are attended by one call."""

    tokens: torch.Tensor
    """`(rows * queries,)`: the positions of their queries in the batch."""
    blocks: torch.Tensor
    """`(rows, blocks)`: block ids that cover `keys`; a shorter row repeats one of its own."""
    keys: slice
    """Which of the gathered token positions any row can see."""
    num_queries: int
    is_causal: bool
    """Queries and keys are the same tokens: no mask is needed."""
    mask: torch.Tensor | None
    """Whether a query sees a key, to broadcast over `(rows, heads, queries, keys)`."""
    unseen: tuple[torch.Tensor, torch.Tensor] | None
    """Rows and keys of gathered slots that no query sees. They may contain anything, even NaN, and 0 * NaN is NaN."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The groups of a batch, and the queries that see nothing."""

    groups: tuple[RowGroup, ...]
    blind_tokens: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Row:
    """A row in host numbers. Keys `first_key:kv_tokens` are visible to some of its queries."""

    index: int
    query_start: int
    num_queries: int
    kv_tokens: int
    first_key: int

    def shape(self, block_tokens: int) -> tuple[int, int, int]:
        """Rows of one shape share a group: decodes of up to twice the blocks, prefills of equal lengths."""
        if self.num_queries > 1:
            return (self.num_queries, self.kv_tokens, self.first_key)
        num_blocks = self.last_block(block_tokens) - self.first_key // block_tokens
        return (1, num_blocks.bit_length(), 0)

    def last_block(self, block_tokens: int) -> int:
        return -(-self.kv_tokens // block_tokens)


def write_kv(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Put the KV of token t, `key[t]` and `value[t]` of `(kv_heads, head_dim)`, at `slots[t]` of a layer's cache.

    A slot is `block_id * block_tokens + offset`. Tokens with a negative one are not written.
    """
    block_tokens = cache.shape[2]
    is_real = slots >= 0
    if not bool(is_real.all()):
        key, value, slots = key[is_real], value[is_real], slots[is_real]
    cache[slots // block_tokens, :, slots % block_tokens] = torch.cat((key, value), dim=-1).to(cache.dtype)


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    rotation: Rotation,
) -> torch.Tensor:
    """The rotated query; also `write_kv` of `value` and of the rotated key. `query` may be overwritten."""
    query, key = rotate(query, key, rotation)
    write_kv(key, value, cache, slots)
    return query


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    max_query_tokens: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of every row's queries over its own blocks; `(tokens, heads, head_dim)`, like `query`.

    Row r asks `query[query_starts[r] : query_starts[r + 1]]`, the last tokens of a context of `kv_lengths[r]` tokens
    whose KV lies in the blocks of `block_tables[r]`. With a `window`, the query at position i sees the key at j when
    `i - j < window`. A query that sees no keys, in a row without KV, gets zeros. Query heads share KV heads in order.
    """
    plan = plan_rows(block_tables, query_starts, kv_lengths, block_tokens=cache.shape[2], window=window)
    return attend_groups(query, cache, plan, scale=scale, out=out)


def plan_rows(
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    block_tokens: int,
    window: int | None,
) -> RowPlan:
    """Sort a batch's rows into groups. Depends only on the batch and the window, not on the layer."""
    starts: list[int] = query_starts.tolist()
    shapes: dict[tuple[int, int, int], list[_Row]] = defaultdict(list)
    blind: list[int] = []
    for index, kv_tokens in enumerate(kv_lengths.tolist()):
        start, num_queries = starts[index], starts[index + 1] - starts[index]
        if num_queries == 0:
            continue
        if kv_tokens == 0:
            blind.extend(range(start, start + num_queries))
            continue
        first_key = 0 if window is None else max(0, kv_tokens - num_queries - window + 1)
        row = _Row(index, start, num_queries, kv_tokens, first_key)
        shapes[row.shape(block_tokens)].append(row)
    plan_group = _Planner(block_tables, block_tokens, window)
    groups = tuple(
        plan_group.decodes(rows) if rows[0].num_queries == 1 else plan_group.prefills(rows) for rows in shapes.values()
    )
    return RowPlan(groups, torch.tensor(blind, device=block_tables.device) if blind else None)


def attend_groups(
    query: torch.Tensor, cache: torch.Tensor, plan: RowPlan, *, scale: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend a planned batch over one layer's cache; the result is as in `paged_attention`."""
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in plan.groups:
        out[group.tokens] = _attend_group(query[group.tokens], cache, group, scale)
    if plan.blind_tokens is not None:
        out[plan.blind_tokens] = 0
    return out


@dataclass(frozen=True, slots=True)
class _Planner:
    """Turns rows of one shape into a group."""

    block_tables: torch.Tensor
    block_tokens: int
    window: int | None

    def prefills(self, rows: list[_Row]) -> RowGroup:
        row = rows[0]
        num_queries, kv_tokens = row.num_queries, row.kv_tokens
        is_causal = num_queries == kv_tokens and (self.window is None or self.window >= kv_tokens)
        mask = None
        if not is_causal:
            keys = torch.arange(row.first_key, kv_tokens, device=self.block_tables.device)
            queries = torch.arange(kv_tokens - num_queries, kv_tokens, device=self.block_tables.device)[:, None]
            mask = keys <= queries
            if self.window is not None:
                mask &= queries - keys < self.window
        return self._group(rows, self._keys(row, kv_tokens), is_causal=is_causal, mask=mask, unseen=None)

    def decodes(self, rows: list[_Row]) -> RowGroup:
        if all((row.kv_tokens, row.first_key) == (rows[0].kv_tokens, rows[0].first_key) for row in rows):
            keys = self._keys(rows[0], rows[0].kv_tokens)
            return self._group(rows, keys, is_causal=False, mask=None, unseen=None)
        num_keys = max(row.kv_tokens - self._origin(row) for row in rows)
        gathered = torch.arange(num_keys, device=self.block_tables.device)
        first = torch.tensor([row.first_key - self._origin(row) for row in rows], device=gathered.device)
        end = torch.tensor([row.kv_tokens - self._origin(row) for row in rows], device=gathered.device)
        seen = (gathered >= first[:, None]) & (gathered < end[:, None])
        return self._group(
            rows, slice(0, num_keys), is_causal=False, mask=seen[:, None, None], unseen=(~seen).nonzero(as_tuple=True)
        )

    def _group(
        self,
        rows: list[_Row],
        keys: slice,
        *,
        is_causal: bool,
        mask: torch.Tensor | None,
        unseen: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> RowGroup:
        device = self.block_tables.device
        num_blocks = -(-keys.stop // self.block_tokens)
        first = torch.tensor([row.first_key // self.block_tokens for row in rows], device=device)
        last = torch.tensor([row.last_block(self.block_tokens) - 1 for row in rows], device=device)
        columns = torch.minimum(first[:, None] + torch.arange(num_blocks, device=device), last[:, None])
        indices = torch.tensor([row.index for row in rows], device=device)
        starts = torch.tensor([row.query_start for row in rows], device=device)
        tokens = starts[:, None] + torch.arange(rows[0].num_queries, device=device)
        return RowGroup(
            tokens=tokens.flatten(),
            blocks=self.block_tables[indices[:, None], columns].long(),
            keys=keys,
            num_queries=rows[0].num_queries,
            is_causal=is_causal,
            mask=mask,
            unseen=unseen,
        )

    def _origin(self, row: _Row) -> int:
        """The position of the first gathered token: blocks are gathered whole."""
        return row.first_key // self.block_tokens * self.block_tokens

    def _keys(self, row: _Row, kv_tokens: int) -> slice:
        return slice(row.first_key - self._origin(row), kv_tokens - self._origin(row))


def _attend_group(query: torch.Tensor, cache: torch.Tensor, group: RowGroup, scale: float) -> torch.Tensor:
    kv_heads = cache.shape[1]
    heads, head_dim = query.shape[1:]
    rows = group.blocks.shape[0]
    kv = _gather(cache, group.blocks)[:, :, group.keys]
    if group.unseen is not None:
        unseen_rows, unseen_keys = group.unseen
        kv[unseen_rows, :, unseen_keys] = 0
    kv = kv.to(query.dtype)
    key, value = kv.split(head_dim, dim=-1)
    if group.num_queries == 1:
        shared = query.view(rows, kv_heads, heads // kv_heads, head_dim)
        return scaled_dot_product_attention(shared, key, value, attn_mask=group.mask, scale=scale).reshape(query.shape)
    attended = scaled_dot_product_attention(
        query.view(rows, group.num_queries, heads, head_dim).transpose(1, 2),
        key,
        value,
        attn_mask=group.mask,
        is_causal=group.is_causal,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return attended.transpose(1, 2).reshape(query.shape)


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The rows' blocks as `(rows, kv_heads, tokens, 2 * head_dim)`: a copy, head by head in runs of whole blocks."""
    _, kv_heads, block_tokens, kv_dim = cache.shape
    block_ids = blocks.flatten()
    gathered = torch.empty((kv_heads, len(block_ids), block_tokens, kv_dim), dtype=cache.dtype, device=cache.device)
    for head in range(kv_heads):
        torch.index_select(cache[:, head], 0, block_ids, out=gathered[head])
    return gathered.view(kv_heads, len(blocks), -1, kv_dim).transpose(0, 1)


def forbid(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Make, in place, the logits of forbidden tokens -inf: in row `rows[i]`, tokens whose bit in `words[i]` is 0.

    Bit `t % 32` of word `t // 32` is token t's. No row occurs twice; rows that are not listed stay unchanged.
    """
    vocab_size = logits.shape[-1]
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    is_allowed = (words[:, :, None] >> bits & 1).bool().view(len(rows), -1)[:, :vocab_size]
    logits[rows] = logits[rows].masked_fill_(~is_allowed, float("-inf"))


def argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The ids, int64, of the largest of each row of `logits` (rows, tokens); of equal ones the lowest."""
    return logits.argmax(-1)


def fed(tokens: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
    """The token ids; `~s` is replaced by `last_tokens[s]`."""
    return torch.where(tokens < 0, last_tokens[(~tokens).clamp_(min=0)], tokens)


def place_words(
    source: torch.Tensor, num_tokens: int, target: torch.Tensor, table: torch.Tensor, last_tokens: torch.Tensor
) -> None:
    """Fill `target` with words of `source`, and `table`, which need not be dense, with the next ones.

    All of it is int32. The first words are `num_tokens` token ids of two words each, which are `fed`.
    """
    num_words = target.numel()
    target.copy_(source[:num_words])
    tokens = target[: 2 * num_tokens].view(torch.int64)
    tokens.copy_(fed(tokens, last_tokens))
    table.copy_(source[num_words : num_words + table.numel()].view(table.shape))
