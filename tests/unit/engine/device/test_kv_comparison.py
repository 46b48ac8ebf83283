"""What counts as rounding when a block is compared with the same block computed again."""

from __future__ import annotations

import math

import pytest
import torch

from kvtier.engine.device.kv_comparison import RoundingBounds, deviation

SHAPE = (4, 2, 16, 32)


def block_of(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bounds(dtype: torch.dtype = torch.float32, *, is_quantized: bool = False) -> RoundingBounds:
    return RoundingBounds(dtype, SHAPE[0], is_quantized=is_quantized)


def test_a_block_does_not_deviate_from_itself() -> None:
    found = deviation(block_of(1), block_of(1))

    assert (found.of_block, found.of_token) == ([0.0] * 4, [0.0] * 4)
    assert bounds().excess(found).times == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_to_the_dtype_is_within_the_bounds_and_another_block_far_beyond(dtype: torch.dtype) -> None:
    exact = block_of(1)

    assert bounds(dtype).excess(deviation(exact.to(dtype), exact)).times < 0.5
    assert bounds(dtype).excess(deviation(block_of(2, dtype), block_of(1, dtype))).times > 5


def test_the_worst_layer_is_told() -> None:
    wrong = block_of(1)
    wrong[2] = block_of(2)[2]

    excess = bounds().excess(deviation(wrong, block_of(1)))
    assert excess.layer == 2
    assert excess.deviation > 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number_is_beyond_every_bound(value: float) -> None:
    wrong = block_of(1)
    wrong[0, 0, 0, 0] = value

    assert bounds().excess(deviation(wrong, block_of(1))).times == math.inf
    assert bounds().excess(deviation(block_of(1), wrong)).times == math.inf


def test_zeros_are_zeros_and_anything_else_is_not() -> None:
    zeros = torch.zeros(SHAPE)

    assert bounds().excess(deviation(zeros, zeros)).times == 0
    assert bounds().excess(deviation(block_of(1), zeros)).times > 5


def test_a_token_that_is_tiny_beside_its_neighbours_is_measured_by_theirs() -> None:
    computed = block_of(1)
    computed[:, :, 0] *= 1e-6
    served = computed.clone()
    served[:, :, 0] *= 2

    assert bounds().excess(deviation(served, computed)).times < 1


def test_what_two_computations_differ_by_widens_the_bounds_but_never_hides_a_wrong_block() -> None:
    computed = block_of(1)
    off = computed * 1.01
    noise = deviation(computed * 1.003, computed)

    assert bounds().excess(deviation(off, computed)).times > 1
    assert bounds().excess(deviation(off, computed), noise).times < 1
    assert bounds().excess(deviation(block_of(2), computed), noise).times > 1


def test_quantized_products_may_be_further_off() -> None:
    found = deviation(block_of(1) * 1.05, block_of(1))

    assert bounds(torch.bfloat16).excess(found).times > 1
    assert bounds(torch.bfloat16, is_quantized=True).excess(found).times < 1
