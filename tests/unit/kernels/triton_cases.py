"""The Triton kernels compute what their twins do: on a GPU where there is one, else in Triton's interpreter.

`test_triton.py` runs this file in a process of its own.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from kvtier.kernels import reference, tuning
from kvtier.kernels.attention import attend
from kvtier.kernels.backend import Backend, paged_attention_of, rotate_and_write_of, write_kv_of
from kvtier.kernels.paged_batch import cut
from kvtier.kernels.rotation import Rotation
from tests.support.batches import DEVICE, NAN, Case, Shape, assert_close, make_case
from tests.support.examples import examples

pytestmark = pytest.mark.sampled

HALF = Shape(heads=6, kv_heads=2, head_dim=64, block_tokens=16, dtype=torch.float16)
MIXED = [(1, 21), (0, 5), (1, 1), (6, 6), (0, 0), (5, 26)]
ROTATION_TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DECODES = [(1, 21), (0, 5), (1, 1), (0, 0), (1, 40)]


@pytest.fixture(params=[0, 8], ids=["joined by a kernel", "joined by the last"])
def _many_splits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Contexts of a few tokens are split too."""
    monkeypatch.setattr(tuning, "MIN_SPLIT_TOKENS", 4)
    monkeypatch.setattr(tuning, "MAX_SPLITS", 8)
    monkeypatch.setattr(tuning, "MAX_LAST_SPLITS", request.param)


@pytest.fixture
def _garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written to holds NaN."""
    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        memory = empty(*args, **kwargs)
        return memory.fill_(NAN) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture
def _gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few tokens are attended over a copy of their KV too."""
    monkeypatch.setattr(tuning, "MIN_GATHER_QUERIES", 0)


def both(case: Case, window: int | None, num_padding_rows: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What Triton and the twin return for the same batch; their caches are compared on the way."""
    attended, caches = [], []
    for backend in (Backend.TRITON, Backend.TORCH):
        cache = case.cache.clone()
        batch = case.batch(backend, num_padding_rows)
        out = torch.full_like(case.query, NAN)
        attend(case.query, case.key, case.value, cache, batch, scale=case.scale, window=window, out=out)
        attended.append(out)
        caches.append(cache.nan_to_num(7.0))
    assert torch.equal(*caches)
    return attended[0], attended[1]


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("lengths", [MIXED, DECODES])
def test_every_head_dim(head_dim: int, lengths: list[tuple[int, int]]) -> None:
    found, expected = both(make_case(lengths, Shape(head_dim=head_dim)), None)

    assert_close(found, expected, torch.float32)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("lengths", [[(1, 9), (11, 20)], [(1, 9), (1, 20)]])
def test_every_number_of_query_heads_per_kv_head(group: int, lengths: list[tuple[int, int]]) -> None:
    found, expected = both(make_case(lengths, Shape(heads=2 * group, kv_heads=2)), None)

    assert_close(found, expected, torch.float32)


@pytest.mark.parametrize("block_tokens", [8, 12, 16, 32, 64])
@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("lengths", [[(3, 70), (1, 33)], [(1, 70), (1, 5)]])
def test_every_block_size_and_window(block_tokens: int, window: int | None, lengths: list[tuple[int, int]]) -> None:
    found, expected = both(make_case(lengths, Shape(block_tokens=block_tokens)), window)

    assert_close(found, expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", [MIXED, DECODES])
def test_half_precision(dtype: torch.dtype, lengths: list[tuple[int, int]]) -> None:
    found, expected = both(make_case(lengths, Shape(heads=6, head_dim=64, dtype=dtype)), None)

    assert_close(found, expected, dtype)


@pytest.mark.usefixtures("_garbage")
@pytest.mark.parametrize(("num_shares", "window"), [(1, None), (40, None), (7, 30), (40, 200)])
@pytest.mark.parametrize("shape", [Shape(head_dim=80, block_tokens=16), HALF])
@pytest.mark.parametrize(
    "lengths",
    [[(1, 700), (1, 3), (1, 129), (1, 40), (1, 1)], [(1, 256)] * 3, [(1, 5)] * 9 + [(1, 900)], [(1, 128)]],
)
def test_rows_that_are_cut_by_their_lengths_equal_the_whole(
    lengths: list[tuple[int, int]], shape: Shape, num_shares: int, window: int | None
) -> None:
    """With two rows of padding, which read nothing."""
    case = make_case(lengths, shape)
    kv_lengths = np.array([*(length for _, length in lengths), 0, 0], np.int32)
    shares = torch.from_numpy(cut(kv_lengths, num_shares)).to(DEVICE)
    counters = torch.zeros(len(kv_lengths) * shape.kv_heads, dtype=torch.int32, device=DEVICE)
    batch = dataclasses.replace(case.batch(Backend.TRITON, 2), shares=shares, counters=counters)
    new = [torch.cat((one, one.new_zeros(2, *one.shape[1:]))) for one in (case.query, case.key, case.value)]
    expected, found = torch.full_like(new[0], NAN), torch.full_like(new[0], NAN)

    for rows, out in ((case.batch(Backend.TORCH, 2), expected), (batch, found)):
        attend(*new, case.cache.clone(), rows, scale=case.scale, window=window, out=out)

    assert_close(found, expected, shape.dtype)
    assert not counters.any(), "the next launch counts from zero"


@pytest.mark.parametrize(("splits", "max_last_splits"), [(1, 8), (3, 0), (3, 8)])
@pytest.mark.parametrize(("window", "block_tokens"), [(None, 16), (100, 12), (7, 8), (200, 64)])
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 128), (14, 64), (6, 160)])
def test_decodes_in_sixteen_bits_over_several_tiles_of_keys(
    heads: int,
    head_dim: int,
    window: int | None,
    block_tokens: int,
    splits: int,
    max_last_splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "splits", lambda **_: splits)
    monkeypatch.setattr(tuning, "MAX_LAST_SPLITS", max_last_splits)
    shape = Shape(heads, 2, head_dim, block_tokens, torch.float16)

    found, expected = both(make_case([(1, 300), (1, 63), (1, 64), (1, 65), (1, 129), (1, 1)], shape), window)

    assert_close(found, expected, torch.float16)


class _NotedLoads:
    """Stands for the interpreter's own loads, and notes from where they are."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self.addresses: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interpreter, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.addresses.update(
            np.asarray(pointers)[np.broadcast_to(np.asarray(mask, bool), np.shape(pointers))].tolist()
        )
        return self._interpreter.load(pointers, mask, other, dtype)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="it is the interpreter that is asked")
@pytest.mark.parametrize("num_shares", [None, 3, 9])
def test_all_blocks_of_a_row_are_looked_up_and_no_others(
    num_shares: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are looked up ahead, too; a share of nothing, and a row of padding, have none."""
    lengths = [(1, 300), (1, 3), (1, 128), (1, 65)]
    case = make_case(lengths, Shape(heads=2, kv_heads=1, head_dim=128, block_tokens=16, dtype=torch.float16))
    batch = case.batch(Backend.TRITON, num_padding_rows=2)
    num_rows, width = batch.block_tables.shape
    around = torch.zeros(num_rows + 200, width, dtype=torch.int32)
    tables = around[100:-100].copy_(batch.block_tables)
    shares = None
    if num_shares is not None:
        shares = torch.from_numpy(cut(np.array([*(length for _, length in lengths), 0, 0], np.int32), num_shares))
    batch = dataclasses.replace(batch, block_tables=tables, shares=shares)
    new = [torch.cat((one, one.new_zeros(2, *one.shape[1:]))) for one in (case.query, case.key, case.value)]
    noted = _NotedLoads(interpreter._interpreter)
    monkeypatch.setattr(interpreter, "_interpreter", noted)

    attend(*new, case.cache, batch, scale=case.scale)

    begin, end = around.data_ptr(), around.data_ptr() + around.nbytes
    found = {(address - tables.data_ptr()) // 4 for address in noted.addresses if begin <= address < end}
    used = [row * width + block for row, (_, length) in enumerate(lengths) for block in range(-(-length // 16))]
    assert found == set(used)


@pytest.mark.usefixtures("_many_splits")
@pytest.mark.parametrize("window", [None, 30])
def test_a_context_in_parts_equals_the_whole(window: int | None) -> None:
    case = make_case([(1, 300), (1, 3), (0, 9), (1, 65)], Shape(head_dim=80, block_tokens=16))

    found, expected = both(case, window)

    assert_close(found, expected, torch.float32)


@pytest.mark.sampled(every=3)
@pytest.mark.usefixtures("_many_splits")
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("lengths", [[(5, 300), (2, 65), (0, 4)], [(24, 90), (1, 30), (13, 13), (3, 60)]])
def test_a_few_queries_behind_a_long_prefix_equal_the_whole(lengths: list[tuple[int, int]], window: int | None) -> None:
    found, expected = both(make_case(lengths, Shape(heads=6, kv_heads=2, block_tokens=16)), window)

    assert_close(found, expected, torch.float32)


@pytest.mark.sampled(every=5)
@pytest.mark.usefixtures("_garbage")
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(
    ("splits", "lengths"),
    [
        (1, [(1, 70), (1, 3)]),
        (2, [(1, 300), (1, 3), (0, 9), (1, 65), (1, 0)]),
        (9, [(1, 300), (1, 3), (0, 9), (1, 65), (1, 0)]),
        (9, [(3, 150), (2, 2)]),
        (64, [(1, 2048)]),
    ],
)
def test_the_program_that_ends_last_joins_the_parts(
    lengths: list[tuple[int, int]],
    window: int | None,
    splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "splits", lambda **_: splits)
    monkeypatch.setattr(tuning, "MAX_LAST_SPLITS", 64)
    padding = [length for length in lengths if length == (1, 0)]
    case = make_case([length for length in lengths if length not in padding], Shape(heads=3, kv_heads=1, head_dim=80))
    batch = case.batch(Backend.TRITON, num_padding_rows=len(padding))
    query = torch.cat((case.query, case.query[: len(padding)]))
    write_kv_of(Backend.TRITON)(case.key, case.value, case.cache, batch.slots[: len(case.key)])
    places = (query, case.cache, batch.block_tables, batch.query_starts, batch.kv_lengths)
    wanted = {"scale": case.scale, "window": window, "max_query_tokens": batch.max_query_tokens}

    first, *others = (
        paged_attention_of(Backend.TRITON)(*places, batch.counters, **wanted)
        for _ in range(2 if triton.knobs.runtime.interpret else 200)
    )

    assert_close(first, reference.paged_attention(*places, **wanted), torch.float32)
    assert all(torch.equal(first, other) for other in others), "the order of the parts is always the same"
    assert not batch.counters.any(), "the counters are left at zero"


@pytest.mark.usefixtures("_gathering")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 64), (4, 4, 64), (7, 1, 128), (8, 2, 128)])
def test_gathered_chunks(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(heads, kv_heads, head_dim, 16, dtype)

    found, expected = both(make_case([(1, 40), (0, 3), (30, 30), (2, 200), (1, 1), (33, 128), (0, 7)], shape), None)

    assert_close(found, expected, dtype)


@pytest.mark.usefixtures("_gathering")
@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 150)).map(lambda pair: (min(pair), max(pair))),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 1 << 16),
)
def test_any_gathered_batch(lengths: list[tuple[int, int]], seed: int) -> None:
    found, expected = both(make_case(lengths, HALF, seed), None)

    assert_close(found, expected, torch.float16)


@pytest.mark.usefixtures("_gathering")
def test_gathered_chunks_and_windows_go_their_own_ways() -> None:
    found, expected = both(make_case([(30, 90), (5, 9)], HALF), 20)

    assert_close(found, expected, torch.float16)


@pytest.mark.usefixtures("_many_splits")
def test_padding_rows_get_zeros_and_write_nothing() -> None:
    case = make_case([(1, 9)])
    batch = case.batch(Backend.TRITON, num_padding_rows=2)
    query, key, value = (torch.cat((one, one, one)) for one in (case.query, case.key, case.value))
    before = case.cache.clone()

    attended = attend(query, key, value, case.cache, batch, scale=case.scale)

    assert torch.equal(attended[1:], torch.zeros_like(attended[1:]))
    assert ((case.cache == before) | before.isnan()).all()
    assert (before.isnan() & ~case.cache.isnan()).sum() == key[0].numel() * 2


def test_rows_without_queries_alone_write_nothing() -> None:
    case = make_case([(0, 9), (0, 0)])

    found, _ = both(case, None)

    assert found.shape[0] == 0


def test_queries_and_keys_may_be_parts_of_one_projection() -> None:
    case = make_case(MIXED)
    heads, kv_heads = case.shape.heads, case.shape.kv_heads
    fused = torch.cat((case.query, case.key, case.value), dim=1)
    query, key, value = fused.split((heads, kv_heads, kv_heads), dim=1)
    cache = case.cache.clone()

    found = attend(query, key, value, cache, case.batch(Backend.TRITON), scale=case.scale)

    assert_close(found, both(case, None)[1], torch.float32)


# The interpreter cuts float32 off to bfloat16 where a GPU rounds.
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, *([] if triton.knobs.runtime.interpret else [torch.bfloat16])]
)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 64, 64), (28, 4, 128, 128), (8, 1, 128, 64), (2, 1, 80, 80), (20, 10, 80, 40)],
)
def test_keys_are_rotated_on_their_way_into_the_cache(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    has_norms: bool,
    is_interleaved: bool,
    dtype: torch.dtype,
) -> None:
    if has_norms and rotary_dim != head_dim:
        pytest.skip("no model has both")
    case = make_case([(1, 9), (3, 5)], Shape(heads, kv_heads, head_dim, dtype=dtype))
    fused = torch.cat((case.query, case.key, case.value), dim=1)
    query, key, value = fused.split((heads, kv_heads, kv_heads), dim=1)
    random = torch.Generator().manual_seed(1)
    weights = torch.randn(2, head_dim, generator=random).to(DEVICE, dtype)
    cos_sin = torch.randn(len(query), rotary_dim, generator=random).to(DEVICE)
    rotation = Rotation(cos_sin, is_interleaved, (weights[0], weights[1]) if has_norms else None, 1e-6)
    slots = case.batch(Backend.TRITON).slots
    slots[1] = -1
    expected_cache, cache = case.cache.clone(), case.cache.clone()
    expected = rotate_and_write_of(Backend.TORCH)(query.clone(), key, value, expected_cache, slots, rotation)

    found = rotate_and_write_of(Backend.TRITON)(query, key, value, cache, slots, rotation)

    tolerance = {"atol": ROTATION_TOLERANCE[dtype], "rtol": ROTATION_TOLERANCE[dtype]}
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(cache, expected_cache, **tolerance, equal_nan=True)
    assert torch.equal(value, case.value), "what is beside query and key stays"


@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 50)).map(lambda pair: (min(pair), max(pair))),
        min_size=1,
        max_size=5,
    ),
    shape=st.builds(
        lambda kv_heads, group, block_tokens: Shape(kv_heads * group, kv_heads, 32, block_tokens),
        st.integers(1, 2),
        st.integers(1, 8),
        st.sampled_from([8, 16, 24]),
    ),
    window=st.one_of(st.none(), st.integers(1, 60)),
    seed=st.integers(0, 1 << 16),
)
def test_any_batch(lengths: list[tuple[int, int]], shape: Shape, window: int | None, seed: int) -> None:
    found, expected = both(make_case(lengths, shape, seed), window)

    assert_close(found, expected, torch.float32)


def huge(num_elements: int, folder: Path) -> torch.Tensor:
    """Memory whose untouched part costs nothing, where the CPU is the device."""
    if DEVICE.type == "cuda":
        return torch.empty(num_elements, dtype=torch.float16, device=DEVICE)
    return torch.from_file(str(folder / "arena"), shared=True, size=num_elements, dtype=torch.float16)


@pytest.mark.parametrize("max_query_tokens", [1, 2])
def test_a_block_beyond_2_to_the_31_elements_is_reached(max_query_tokens: int, tmp_path: Path) -> None:
    block_tokens, head_dim, block_stride, block_id = 8, 32, 1 << 29, 5
    arena = huge((block_id + 1) * block_stride, tmp_path)
    cache = arena.as_strided((block_id + 1, 1, block_tokens, 2 * head_dim), (block_stride, 512, 2 * head_dim, 1))
    key, value, query = torch.randn(3, 2, 1, head_dim, device=DEVICE).half()
    slots = torch.tensor([block_id * block_tokens, block_id * block_tokens + 1], device=DEVICE)
    table, starts, lengths = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in ([[block_id]], [0, 1], [2])
    )

    write_kv_of(Backend.TRITON)(key, value, cache, slots)
    places = (query[:1], cache, table, starts, lengths)
    counters = torch.zeros(tuning.MAX_SPLIT_TILES, dtype=torch.int32, device=DEVICE)
    attended = [
        paged_attention_of(Backend.TRITON)(
            *places, counters, scale=0.2, window=None, max_query_tokens=max_query_tokens
        ),
        reference.paged_attention(*places, scale=0.2, window=None, max_query_tokens=max_query_tokens),
    ]

    assert torch.equal(cache[block_id, 0, :2], torch.cat((key, value), -1)[:, 0])
    assert_close(*attended, torch.float16)


@pytest.mark.parametrize("max_query_tokens", [1, 16])
def test_a_small_batch_of_long_contexts_is_split_and_a_large_one_is_not(max_query_tokens: int) -> None:
    def splits(num_programs: int, max_kv_tokens: int) -> int:
        return tuning.splits(num_programs=num_programs, max_query_tokens=max_query_tokens, max_kv_tokens=max_kv_tokens)

    assert splits(32, 1 << 20) == (8 if max_query_tokens == 1 else 33), "as many programs as run at once, or so"
    assert splits(256 * 8, 1 << 20) == 1
    assert splits(1, 100) == 1
    assert splits(1, 1 << 20) == tuning.MAX_SPLITS


def test_the_programs_of_every_small_decode_run_at_once() -> None:
    for num_programs in range(1, tuning.FULL_DECODE_PROGRAMS + 1):
        splits = tuning.splits(num_programs=num_programs, max_query_tokens=1, max_kv_tokens=1 << 20)
        assert num_programs * splits <= tuning.FULL_DECODE_PROGRAMS
        assert num_programs * (splits + 1) > tuning.FULL_DECODE_PROGRAMS or splits == tuning.MAX_SPLITS


def test_only_few_small_parts_are_left_to_the_program_that_ends_last() -> None:
    assert tuning.joins_last(splits=9, rows=16)
    assert not tuning.joins_last(splits=tuning.MAX_SPLITS, rows=16)
    assert not tuning.joins_last(splits=2, rows=128)


@pytest.mark.parametrize("max_query_tokens", [1, 16])
def test_there_is_a_counter_for_every_tile_that_may_be_split(max_query_tokens: int) -> None:
    split = [
        count
        for count in range(1, 2 * tuning.FULL_PROGRAMS)
        if tuning.splits(num_programs=count, max_query_tokens=max_query_tokens, max_kv_tokens=1 << 20) > 1
    ]

    assert 0 < max(split) <= tuning.MAX_SPLIT_TILES
