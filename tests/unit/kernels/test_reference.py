"""The torch twins compute what the definition says, whatever lies in the slots nobody wrote."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.kernels import reference
from kvtier.kernels.attention import attend
from kvtier.kernels.backend import Backend
from tests.support.batches import DEVICE, NAN, Case, Shape, assert_close, dense_attention, make_case
from tests.support.examples import examples

LENGTHS = st.tuples(st.integers(0, 9), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair)))


def twin(case: Case, window: int | None = None) -> torch.Tensor:
    batch = case.batch(Backend.TORCH)
    return attend(case.query, case.key, case.value, case.cache, batch, scale=case.scale, window=window)


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    block_tokens=st.sampled_from([5, 8, 16]),
    window=st.one_of(st.none(), st.integers(1, 45)),
    seed=st.integers(0, 1 << 16),
)
def test_any_batch_is_attended_as_the_definition_says(
    lengths: list[tuple[int, int]], kv_heads: int, group: int, block_tokens: int, window: int | None, seed: int
) -> None:
    shape = Shape(heads=kv_heads * group, kv_heads=kv_heads, block_tokens=block_tokens)
    case = make_case(lengths, shape, seed)

    assert_close(twin(case, window), dense_attention(case, window), shape.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[(1, 20), (1, 33), (1, 20)], [(7, 7), (4, 19), (1, 8)]])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype, lengths: list[tuple[int, int]]) -> None:
    case = make_case(lengths, Shape(heads=6, kv_heads=2, head_dim=64, dtype=dtype))

    assert_close(twin(case), dense_attention(case, None), dtype)


def test_a_prefill_in_chunks_equals_a_prefill_at_once() -> None:
    whole = make_case([(30, 30)])
    expected = twin(whole)
    cache = torch.full_like(whole.cache, NAN)
    parts = []
    for start, end in [(0, 11), (11, 12), (12, 30)]:
        chunk = slice(start, end)
        rows = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
        table = torch.tensor([whole.rows[0].block_ids], dtype=torch.int32, device=DEVICE)
        slots = whole.batch(Backend.TORCH).slots[chunk]
        reference.write_kv(whole.key[chunk], whole.value[chunk], cache, slots)
        parts.append(
            reference.paged_attention(
                whole.query[chunk],
                cache,
                table,
                rows,
                torch.tensor([end], dtype=torch.int32, device=DEVICE),
                scale=whole.scale,
                window=None,
                max_query_tokens=end - start,
            )
        )

    assert_close(torch.cat(parts), expected, torch.float32)


def test_a_query_of_a_row_without_kv_gets_zeros() -> None:
    case = make_case([(1, 9)])
    batch = case.batch(Backend.TORCH, num_padding_rows=2)
    query, key, value = (torch.cat((one, one, one)) for one in (case.query, case.key, case.value))

    attended = attend(query, key, value, case.cache, batch, scale=case.scale)

    assert_close(attended[:1], dense_attention(case, None), torch.float32)
    assert torch.equal(attended[1:], torch.zeros_like(attended[1:]))


def test_negative_slots_are_not_written() -> None:
    case = make_case([(1, 9)])
    before = case.cache.clone()

    reference.write_kv(case.key, case.value, case.cache, torch.tensor([-1], device=DEVICE))

    assert torch.equal(case.cache.nan_to_num(7.0), before.nan_to_num(7.0))


def test_the_result_goes_where_the_caller_says() -> None:
    case = make_case([(3, 9), (1, 4)])
    out = torch.full_like(case.query, NAN)

    batch = case.batch(Backend.TORCH)
    returned = attend(case.query, case.key, case.value, case.cache, batch, scale=case.scale, out=out)

    assert returned is out
    assert not out.isnan().any()


def test_a_batch_is_planned_once_per_window() -> None:
    batch = make_case([(3, 9), (1, 4)]).batch(Backend.TORCH)

    assert batch.plan(None) is batch.plan(None)
    assert batch.plan(4) is not batch.plan(None)
