"""One step's rows as the attention kernels read them: made once per step, used by every layer.

The runner's thread lays it out on the host and brings it to the device with one copy: into memory of its own, or to the
fixed addresses of `DecodeBuffers` and `ChunkBuffers`, from which CUDA graphs read it and the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels import reference, tuning
from kvtier.kernels.backend import Backend
from kvtier.kernels.tuning import GATHER_TOKENS, MAX_SPLIT_TILES
from kvtier.kernels.upload import packed_bytes, unpack, upload, upload_into

_SHARE_TOKENS = 128
_SPARE_SHARES = 4


class PagedRow(NamedTuple):
    """A request's part of a step: its last `query_tokens` of `kv_tokens` are computed, the rest is in its blocks.

    `block_ids` holds at least enough ids for `kv_tokens`. For long contexts, pass an int32 array, not a list. Unless it
    `writes`, the KV of what is computed is in its blocks already.
    """

    block_ids: Sequence[int] | npt.NDArray[np.int32]
    query_tokens: int
    kv_tokens: int
    writes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedArrays:
    """A `PagedBatch` on the host."""

    slots: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int32]
    query_starts: npt.NDArray[np.int32]
    kv_lengths: npt.NDArray[np.int32]
    gather_starts: npt.NDArray[np.int32]
    num_gathered_tokens: int
    queries_per_key: float
    max_query_tokens: int
    num_decodes: int
    block_tokens: int

    @classmethod
    def lay_out(
        cls,
        rows: Sequence[PagedRow],
        *,
        block_tokens: int,
        num_padding_rows: int = 0,
        num_empty_rows: int = 0,
        num_padding_tokens: int = 0,
    ) -> PagedArrays:
        """Lay out `rows`, in order, then padding rows of one query each that reads and writes nothing.

        Then rows without a query, and tokens that belong to no row, for which attention's result is undefined.
        """
        num_rows = len(rows) + num_padding_rows + num_empty_rows
        counts = np.ones(num_rows, np.int64)
        counts[num_rows - num_empty_rows :] = 0
        kv_lengths = np.zeros(num_rows, np.int64)
        writes = np.ones(num_rows, np.bool_)
        num_blocks = [-(-row.kv_tokens // block_tokens) for row in rows]
        tables = np.zeros((num_rows, max(num_blocks, default=1) or 1), np.int32)
        for index, row in enumerate(rows):
            assert 0 <= row.query_tokens <= row.kv_tokens, row
            counts[index], kv_lengths[index], writes[index] = row.query_tokens, row.kv_tokens, row.writes
            tables[index, : num_blocks[index]] = row.block_ids[: num_blocks[index]]
        starts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        row_of = np.repeat(np.arange(num_rows), counts)
        positions = np.arange(starts[-1]) - starts[row_of] + (kv_lengths - counts)[row_of]
        slots = tables[row_of, positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens
        slots[(positions < 0) | ~writes[row_of]] = -1
        np.maximum(positions, 0, out=positions)
        if num_padding_tokens:
            slots = np.concatenate((slots, np.full(num_padding_tokens, -1)))
            positions = np.concatenate((positions, np.zeros(num_padding_tokens, np.int64)))
        is_long = counts > 1
        num_decodes = int(is_long.argmax()) if is_long.any() else num_rows
        prefill_counts, prefill_lengths = counts[num_decodes:], kv_lengths[num_decodes:]
        gathered_tokens = -(-prefill_lengths // GATHER_TOKENS) * GATHER_TOKENS
        gather_starts = (np.cumsum(gathered_tokens) - gathered_tokens).astype(np.int32)
        return cls(
            slots=slots,
            positions=positions,
            block_tables=tables,
            query_starts=starts,
            kv_lengths=kv_lengths.astype(np.int32),
            gather_starts=gather_starts,
            num_gathered_tokens=int(gathered_tokens.sum()),
            queries_per_key=float(prefill_counts @ prefill_lengths) / max(int(prefill_lengths.sum()), 1),
            max_query_tokens=int(counts.max(initial=0)),
            num_decodes=num_decodes,
            block_tokens=block_tokens,
        )

    @property
    def num_rows(self) -> int:
        return len(self.kv_lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    def upload(self, device: torch.device, backend: Backend | None = None) -> PagedBatch:
        """The batch, in memory of its own. `backend` is by default the device's."""
        counters = np.zeros(MAX_SPLIT_TILES, np.int32)
        on_device = upload(
            [
                self.slots,
                self.positions,
                self.block_tables,
                self.query_starts,
                self.kv_lengths,
                self.gather_starts,
                counters,
            ],
            device,
        )
        return PagedBatch(
            slots=on_device[0],
            positions=on_device[1],
            block_tables=on_device[2],
            query_starts=on_device[3],
            kv_lengths=on_device[4],
            gather_starts=on_device[5],
            counters=on_device[6],
            max_query_tokens=self.max_query_tokens,
            num_decodes=self.num_decodes,
            num_gathered_tokens=self.num_gathered_tokens,
            queries_per_key=self.queries_per_key,
            block_tokens=self.block_tokens,
            backend=backend or Backend.of(device),
        )


@dataclass(frozen=True)
class PagedBatch:
    """Rows of one step. Rows of one query or none that come first are decoded by their own kernel."""

    block_tables: torch.Tensor
    """`(rows, blocks)` int32: the block ids of each row; entries past its KV are never read."""
    query_starts: torch.Tensor
    """`(rows + 1,)` int32: row r's queries are tokens `query_starts[r]` to `query_starts[r + 1]`."""
    kv_lengths: torch.Tensor
    """`(rows,)` int32: tokens of context, this step's included."""
    slots: torch.Tensor
    """`(tokens,)` int64: where each token's KV goes; negative if it is not written."""
    positions: torch.Tensor
    """`(tokens,)` int64: each token's place in its context."""
    counters: torch.Tensor
    """Counters (int32, zero) by which kernels find the program that ends last. They are left at zero."""
    max_query_tokens: int
    num_decodes: int
    """How many leading rows have at most one query."""
    gather_starts: torch.Tensor
    """`(rows - num_decodes,)` int32: where the KV of each other row goes if it is copied into one piece."""
    num_gathered_tokens: int
    queries_per_key: float
    """How many of their queries read a key of those rows, on average."""
    block_tokens: int
    backend: Backend
    shares: torch.Tensor | None = None
    """How the keys of decodes are cut, see `cut`. Without it, each row has the same number of parts."""
    _plans: dict[int | None, reference.RowPlan] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return int(self.kv_lengths.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.slots.shape[0])

    def plan(self, window: int | None) -> reference.RowPlan:
        """The torch twin's plan, made at the first layer that asks for this window."""
        if window not in self._plans:
            self._plans[window] = reference.plan_rows(
                self.block_tables, self.query_starts, self.kv_lengths, block_tokens=self.block_tokens, window=window
            )
        return self._plans[window]


def cut(kv_lengths: npt.NDArray[np.int32], num_shares: int) -> npt.NDArray[np.int32]:
    """Shares of the keys of rows of one query each, about equal: `(len(kv_lengths) + num_shares, 4)` int32.

    Of each share its row, its number among those of the row, how many the row has, and the row's length. Those of a
    row follow each other, and every row has one. There are up to `num_shares` of rows with keys, or some more than
    such rows if they are many, so that the longest are cut still. What is left of the array is -1.
    """
    counts = _num_shares((-(-kv_lengths // _SHARE_TOKENS)).tobytes(), num_shares)
    num_rows = len(kv_lengths)
    shares = np.full((num_rows + num_shares, 4), -1, np.int32)
    ends = np.cumsum(counts)
    total = int(counts.sum())
    shares[:total, 0] = np.repeat(np.arange(num_rows), counts)
    shares[:total, 1] = np.arange(total) - np.repeat(ends - counts, counts)
    shares[:total, 2] = np.repeat(counts, counts)
    shares[:total, 3] = np.repeat(kv_lengths, counts)
    return shares


@functools.lru_cache(maxsize=4)
def _num_shares(tiles_of_rows: bytes, num_shares: int) -> npt.NDArray[np.int32]:
    """Shares per row, from the rows' numbers of tiles (int32). Seldom changes from step to step."""
    tiles = np.frombuffer(tiles_of_rows, np.int32)
    most = max(num_shares, int(np.count_nonzero(tiles)) + num_shares // _SPARE_SHARES)
    low, high = max(-(-int(tiles.sum()) // most), 1), max(int(tiles.max(initial=1)), 1)
    while low < high:  # as few tiles per share as possible
        middle = (low + high) // 2
        if int((-(-tiles // middle)).sum()) <= most:
            high = middle
        else:
            low = middle + 1
    counts: npt.NDArray[np.int32] = np.clip(-(-tiles // high), 1, tuning.MAX_ROW_SHARES)
    return counts


class _Buffers:
    """A step's tokens and its batch, with room for the largest, at fixed addresses. The runner's thread owns them.

    Where the numbers of a batch begin depends only on how many tokens and rows it has.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_rows: int,
        max_blocks: int,
        block_tokens: int,
        last_tokens: torch.Tensor,
        num_counters: int = MAX_SPLIT_TILES,
    ) -> None:
        """A token `~s` stands for `last_tokens[s]`, with its value when the device reads it."""
        device = last_tokens.device
        self._block_tokens = block_tokens
        self._last_tokens = last_tokens
        self._numbers = torch.zeros(packed_bytes(self._like(max_tokens, max_rows)), dtype=torch.uint8, device=device)
        self._block_tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self._counters = torch.zeros(num_counters, dtype=torch.int32, device=device)
        self._backend = Backend.of(device)

    def tokens(self, num_tokens: int) -> torch.Tensor:
        """The token ids of a step of this many tokens, including padding, as they were last filled in."""
        return self._numbers[: num_tokens * 8].view(torch.int64)

    def _batch(self, *, num_tokens: int, num_rows: int, max_query_tokens: int, num_decodes: int) -> PagedBatch:
        unpacked = unpack(self._numbers, self._like(num_tokens, num_rows))
        _, slots, positions, query_starts, kv_lengths, shares = unpacked
        return PagedBatch(
            block_tables=self._block_tables[:num_rows],
            query_starts=query_starts,
            kv_lengths=kv_lengths,
            slots=slots,
            positions=positions,
            counters=self._counters,
            max_query_tokens=max_query_tokens,
            num_decodes=num_decodes,
            gather_starts=query_starts[:0],
            num_gathered_tokens=0,
            queries_per_key=0.0,
            block_tokens=self._block_tokens,
            backend=self._backend,
            shares=shares if shares.numel() else None,
        )

    def fill(self, tokens: npt.NDArray[np.int64], arrays: PagedArrays) -> None:
        """Bring a step into place, in the current stream's order. Tokens of padding may be left out."""
        padded = np.zeros(arrays.num_tokens, np.int64)
        padded[: len(tokens)] = tokens
        upload_into(
            self._numbers_of(padded, arrays),
            arrays.block_tables,
            target=self._numbers,
            table_target=self._block_tables,
            last_tokens=self._last_tokens,
        )

    def _like(self, num_tokens: int, num_rows: int) -> list[npt.NDArray[np.generic]]:
        """Arrays with the dtypes and shapes of such a step."""
        padding = PagedArrays.lay_out(
            [], block_tokens=self._block_tokens, num_empty_rows=num_rows, num_padding_tokens=num_tokens
        )
        return self._numbers_of(np.zeros(num_tokens, np.int64), padding)

    def _numbers_of(self, tokens: npt.NDArray[np.int64], arrays: PagedArrays) -> list[npt.NDArray[np.generic]]:
        """The step's contents except the block tables; the tokens first."""
        shares = self._shares(arrays.kv_lengths)
        return [tokens, arrays.slots, arrays.positions, arrays.query_starts, arrays.kv_lengths, shares]

    def _shares(self, kv_lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return np.zeros((0, 4), np.int32)


class DecodeBuffers(_Buffers):
    """Room for the largest decode batch: graphs of every size share it.

    Capture a graph of n rows on `tokens(n)` and `batch(n)`; before each replay `fill` it with a batch of exactly n
    rows, padding included.
    """

    def __init__(
        self, *, max_rows: int, max_blocks: int, block_tokens: int, last_tokens: torch.Tensor, kv_heads: int
    ) -> None:
        self._kv_heads = kv_heads
        super().__init__(
            max_tokens=max_rows,
            max_rows=max_rows,
            max_blocks=max_blocks,
            block_tokens=block_tokens,
            last_tokens=last_tokens,
            num_counters=max(MAX_SPLIT_TILES, max_rows * kv_heads),
        )

    def batch(self, num_rows: int) -> PagedBatch:
        """The first rows as a batch of one query each, as they were last filled in."""
        return self._batch(num_tokens=num_rows, num_rows=num_rows, max_query_tokens=1, num_decodes=num_rows)

    def fill(self, tokens: npt.NDArray[np.int64], arrays: PagedArrays) -> None:
        """As for any batch; here, each row has one query."""
        assert arrays.num_tokens == arrays.num_rows == arrays.num_decodes
        super().fill(tokens, arrays)

    def _shares(self, kv_lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        if not tuning.has_shares(num_rows=len(kv_lengths), kv_heads=self._kv_heads):
            return super()._shares(kv_lengths)
        return cut(kv_lengths, tuning.decode_shares(self._kv_heads))


class ChunkBuffers(_Buffers):
    """Room for the largest batch of a few short chunks, decodes among them: graphs of every size share it.

    Capture a graph on `tokens(n)` and `batch(n, rows)`; before each replay `fill` it with a batch of exactly as many
    tokens and rows, padding tokens and empty rows included.
    """

    def batch(self, num_tokens: int, num_rows: int) -> PagedBatch:
        """Rows of any number of queries, as they were last filled in."""
        return self._batch(num_tokens=num_tokens, num_rows=num_rows, max_query_tokens=num_tokens, num_decodes=0)
