"""The fused operations compute what their twins in plain torch do. `test_triton.py` runs this file too."""

from __future__ import annotations

import pytest
import torch
import triton

from kvtier.kernels import elementwise
from kvtier.models import fused_operations
from kvtier.models.quantization import fp8
from tests.support.batches import DEVICE

pytestmark = pytest.mark.sampled

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""In 16 bits, one step of the last digit where a sum was added in another order."""

# The interpreter cuts float32 off to bfloat16 where a GPU rounds.
_TESTED = [dtype for dtype in TOLERANCE if dtype != torch.bfloat16 or not triton.knobs.runtime.interpret]

dtypes = pytest.mark.parametrize("dtype", _TESTED)


def normal(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance * 1e-2, rtol=tolerance)


@dtypes
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (3, 100), (5, 3584), (0, 64)])
def test_norms(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    hidden, residual = normal(2, num_tokens, size, dtype=dtype)
    weight = normal(size, dtype=dtype, seed=1)

    assert_same(elementwise.rms_norm(hidden, weight, 1e-5), fused_operations.plain_rms_norm(hidden, weight, 1e-5))
    normed, total = elementwise.add_rms_norm(hidden, residual, weight, 1e-5)
    expected = fused_operations.plain_add_rms_norm(hidden, residual, weight, 1e-5)
    assert torch.equal(total, expected[1])
    assert_same(normed, expected[0])


def test_rows_of_a_norm_may_lie_apart() -> None:
    wide = normal(4, 256, dtype=torch.float32)
    weight = normal(128, dtype=torch.float32, seed=1)

    found = elementwise.add_rms_norm(wide[:, :128], wide[:, 128:], weight, 1e-6)[0]

    assert_same(found, fused_operations.plain_add_rms_norm(wide[:, :128], wide[:, 128:], weight, 1e-6)[0])
    limits = {"max_value": fp8._FP8_MAX, "min_scale": fp8._MIN_SCALE}
    quantized, _ = elementwise.quantized_rms_norm(wide[:, :128], wide[:, 128:], weight, 1e-6, **limits)
    values, scales = elementwise.quantize_rows(found, **limits)
    assert torch.equal(quantized.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(quantized.scales, scales)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (3, 100), (5, 3584), (40, 1000), (0, 64)])
def test_a_norm_in_eight_bits_is_the_norm_quantised(
    num_tokens: int, size: int, has_residual: bool, dtype: torch.dtype
) -> None:
    """To the last bit: whether a norm quantises or a kernel after it changes no result of a model."""
    hidden, residual = normal(2, num_tokens, size, dtype=dtype)
    weight = 30 * normal(size, dtype=dtype, seed=1)
    if num_tokens > 1:
        hidden[1] = residual[1] = 0
    limits = {"max_value": fp8._FP8_MAX, "min_scale": fp8._MIN_SCALE}

    found, total = elementwise.quantized_rms_norm(hidden, residual if has_residual else None, weight, 1e-5, **limits)

    normed, expected_total = elementwise.rms_norm(hidden, weight, 1e-5), hidden
    if has_residual:
        normed, expected_total = elementwise.add_rms_norm(hidden, residual, weight, 1e-5)
    values, scales = elementwise.quantize_rows(normed, **limits)
    assert torch.equal(found.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found.scales, scales)
    assert torch.equal(total, expected_total)
    assert (found.dtype, found.shape, found.device) == (dtype, hidden.shape, hidden.device)


@dtypes
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 32), (3, 2048), (2, 2500), (0, 32)])
def test_gates(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 4 * normal(num_tokens, 2 * size, dtype=dtype)

    assert_same(elementwise.silu_mul(gate_up), fused_operations.plain_silu_mul(gate_up))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "size", "inputs"), [(1, 64, 128), (10, 96, 384), (16, 32, 256), (0, 32, 128)])
def test_gates_of_a_few_tokens_with_their_products(num_tokens: int, size: int, inputs: int, dtype: torch.dtype) -> None:
    hidden = normal(num_tokens, inputs, dtype=dtype)
    weight = normal(2 * size, inputs, dtype=dtype, seed=1) / inputs**0.5

    found = elementwise.linear_silu_mul(hidden, weight)

    expected = fused_operations.plain_silu_mul(torch.nn.functional.linear(hidden, weight))
    torch.testing.assert_close(found, expected, atol=4 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize(("num_tokens", "size", "inputs"), [(17, 64, 128), (1, 40, 128), (1, 64, 100)])
def test_other_products_are_not_fused(num_tokens: int, size: int, inputs: int) -> None:
    hidden, weight = normal(num_tokens, inputs, dtype=torch.float16), normal(2 * size, inputs, dtype=torch.float16)

    assert elementwise.linear_silu_mul(hidden, weight) is None


@dtypes
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 1000), (2, 4096), (2, 10000), (0, 64)])
def test_rows_in_eight_bits(num_rows: int, size: int, dtype: torch.dtype) -> None:
    rows = normal(num_rows, size, dtype=dtype) * 30
    if num_rows > 1:
        rows[1] = 0

    values, scales = elementwise.quantize_rows(rows, max_value=fp8._FP8_MAX, min_scale=fp8._MIN_SCALE)

    # On the CPU: where a GPU divides by a constant, torch multiplies with its inverse.
    expected, expected_scales = fp8.plain_quantize_rows(rows.cpu())
    assert torch.equal(scales.cpu(), expected_scales)
    values = values.cpu().float()
    is_equal = values == expected.float()
    # The interpreter forgets the carry where a number is rounded up to the next power of two.
    assert not num_rows or is_equal.float().mean() > (0.9 if triton.knobs.runtime.interpret else 0.999)
