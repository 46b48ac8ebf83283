"""Products of a few tokens compute what their twins do. `test_triton.py` runs this file too."""

from __future__ import annotations

import pytest
import torch
import triton

from kvtier.kernels import elementwise, fp8_product, int4_product, plain_product, tuning
from kvtier.kernels.quantized_rows import QuantizedRows
from kvtier.models import fused_operations, linear
from kvtier.models.quantization import fp8, gptq
from tests.support.batches import DEVICE

pytestmark = pytest.mark.sampled

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# The interpreter cuts float32 off to bfloat16 where a GPU rounds, which is one step of the last digit.
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE))

LIMITS = {"max_value": fp8._FP8_MAX, "min_scale": fp8._MIN_SCALE}


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def eights(rows: int, columns: int, *, seed: int) -> torch.Tensor:
    """Numbers of which each fits into 8 bits; the largest of each row is the largest of those.

    So no rounding is tested here. The interpreter forgets the carry where one is rounded to the next power of two.
    """
    bits = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8, generator=random(seed))
    signs = torch.randint(0, 2, (rows, columns), dtype=torch.uint8, generator=random(seed + 1)) << 7
    numbers = (bits | signs).view(torch.float8_e4m3fn).float()
    if columns:
        numbers[:, -1] = 448.0
    return numbers.to(DEVICE)


def make_layer(outputs: int, inputs: int, *, has_bias: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    weight = eights(outputs, inputs, seed=10).to(torch.float8_e4m3fn)
    scales = (torch.rand(outputs, 1, generator=random(12)) / (448 * inputs**0.5)).to(DEVICE)
    bias = torch.randn(outputs, generator=random(13)).to(DEVICE, dtype) if has_bias else None
    return [weight, scales, bias, fp8_product.make_counters(outputs, DEVICE)]


def expected_product(hidden: torch.Tensor, layer: list[torch.Tensor]) -> torch.Tensor:
    """In float32, of numbers that are exact in 8 bits."""
    weight, scales, bias, _ = layer
    largest = hidden.float().abs().amax(-1, keepdim=True)
    value_scales = (largest / fp8._FP8_MAX).clamp(min=fp8._MIN_SCALE)
    values = (hidden.float() / value_scales).to(torch.float8_e4m3fn)
    on_cpu = [tensor.cpu() for tensor in (values, value_scales, weight, scales)]
    product = fp8.scaled_matmul(*on_cpu, torch.float32).to(DEVICE)
    return product if bias is None else product + bias.float()


def quantized(hidden: torch.Tensor) -> QuantizedRows:
    return QuantizedRows(*elementwise.quantize_rows(hidden, **LIMITS), hidden.dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the last digits of the largest: tensor cores keep few more while they sum up products of 8-bit floats."""
    tolerance = TOLERANCE[found.dtype]
    largest = float(expected.abs().max())
    torch.testing.assert_close(found.float(), expected, atol=tolerance * largest, rtol=tolerance)


@dtypes
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "inputs", "outputs"),
    [(1, 512, 128), (3, 304, 80), (16, 256, 64), (16, 1040, 16), (7, 16, 208), (20, 640, 144), (64, 256, 128)],
)
def test_products_in_eight_bits(num_tokens: int, inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    layer = make_layer(outputs, inputs, has_bias=has_bias, dtype=dtype)
    hidden = (eights(num_tokens, inputs, seed=0) / 64).to(dtype)
    if num_tokens > 2:
        hidden[1] = 0
        hidden[2] /= 32

    found = fp8_product.linear(hidden, *layer, **LIMITS)

    assert found is not None
    assert_same(found, expected_product(hidden, layer))
    assert not layer[3].any(), "the counters are left at zero"


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_rows_that_are_too_long_are_quantised_before(num_tokens: int) -> None:
    inputs = tuning.MAX_OWN_PEAKS + 16
    layer = make_layer(32, inputs, has_bias=False, dtype=torch.float16)
    hidden = eights(num_tokens, inputs, seed=0).half()

    assert_same(fp8_product.linear(hidden, *layer, **LIMITS), expected_product(hidden, layer))


@dtypes
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "inputs", "outputs"),
    [(1, 512, 128), (2, 3584, 64), (3, 304, 80), (4, 1040, 16), (5, 16, 208), (16, 256, 64), (33, 640, 144)],
)
def test_rows_may_come_in_eight_bits(
    num_tokens: int, inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    layer = make_layer(outputs, inputs, has_bias=has_bias, dtype=dtype)
    hidden = (eights(num_tokens, inputs, seed=0) / 64).to(dtype)

    found = fp8_product.linear(quantized(hidden), *layer, **LIMITS)

    assert found is not None
    assert found.dtype is dtype
    assert_same(found, expected_product(hidden, layer))
    assert not layer[3].any(), "the counters are left at zero"


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_a_few_rows_in_eight_bits_give_what_they_give_when_they_are_quantised_on_the_way(num_tokens: int) -> None:
    """With any numbers, and to the last bit."""
    layer = make_layer(128, 3584, has_bias=True, dtype=torch.float16)
    hidden = torch.randn(num_tokens, 3584, generator=random(5)).to(DEVICE, torch.float16)
    rows = quantized(hidden)

    assert torch.equal(fp8_product.linear(rows, *layer, **LIMITS), fp8_product.linear(hidden, *layer, **LIMITS))
    gated, peaks = fp8_product.linear_silu_mul(rows, *layer, **LIMITS)
    expected, expected_peaks = fp8_product.linear_silu_mul(hidden, *layer, **LIMITS)
    assert torch.equal(gated, expected)
    assert torch.equal(peaks, expected_peaks)


def test_peaks_that_are_known_are_taken() -> None:
    layer = make_layer(48, 160, has_bias=False, dtype=torch.float16)
    hidden = eights(3, 160, seed=0).half()
    peaks = torch.tensor([[1.0, 448.0, 0.0], [448.0, 2.0, 3.0], [0.0, 1.0, 448.0]], device=DEVICE)
    expected = expected_product(hidden, layer)

    assert_same(fp8_product.linear(hidden, *layer, **LIMITS, peaks=peaks), expected)
    # With a scale that is too large, most numbers are less than the least in 8 bits: it is the peaks that count.
    coarse = fp8_product.linear(hidden / 4096, *layer, **LIMITS, peaks=torch.full((3, 1), 448.0, device=DEVICE))
    assert not torch.allclose(coarse.float() * 4096, expected, rtol=1e-2, atol=1e-2)


def test_rows_may_lie_apart() -> None:
    layer = make_layer(48, 160, has_bias=False, dtype=torch.float16)
    wide = eights(4, 320, seed=0).half()
    wide[:, 159] = 448

    found = fp8_product.linear(wide[:, :160], *layer, **LIMITS)

    assert_same(found, expected_product(wide[:, :160].contiguous(), layer))


@dtypes
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "inputs", "size"), [(1, 256, 64), (4, 304, 80), (16, 128, 32), (9, 1600, 24), (33, 256, 72)]
)
def test_gates_in_eight_bits(num_tokens: int, inputs: int, size: int, has_bias: bool, dtype: torch.dtype) -> None:
    layer = make_layer(2 * size, inputs, has_bias=has_bias, dtype=dtype)
    hidden = (eights(num_tokens, inputs, seed=0) / 64).to(dtype)

    gated, peaks = fp8_product.linear_silu_mul(hidden, *layer, **LIMITS)

    expected = fused_operations.plain_silu_mul(expected_product(hidden, layer).to(dtype)).float()
    torch.testing.assert_close(gated.float(), expected, atol=4 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype])
    assert torch.equal(peaks.amax(-1), gated.float().abs().amax(-1)), "the next product knows the largest numbers"


def test_numbers_are_rounded_as_by_the_kernel_that_quantises() -> None:
    """With any numbers: rows that are quantised on the way and rows that were before give the same."""
    layer = make_layer(64, 512, has_bias=False, dtype=torch.float16)
    hidden = torch.randn(40, 512, generator=random(5)).to(DEVICE, torch.float16)
    assert hidden.numel() > tuning.MAX_OWN_PEAKS

    before = fp8_product.linear(hidden, *layer, **LIMITS)
    on_the_way = fp8_product.linear(hidden, *layer, **LIMITS, peaks=hidden.float())

    torch.testing.assert_close(on_the_way, before, atol=1e-3, rtol=1e-3)


def test_no_tokens_make_no_outputs() -> None:
    layer = make_layer(64, 128, has_bias=False, dtype=torch.float16)
    hidden = torch.empty((0, 128), dtype=torch.float16, device=DEVICE)

    assert fp8_product.linear(hidden, *layer, **LIMITS).shape == (0, 64)
    assert fp8_product.linear_silu_mul(hidden, *layer, **LIMITS)[0].shape == (0, 32)
    assert fp8_product.linear(quantized(hidden), *layer, **LIMITS).shape == (0, 64)


def test_more_tokens_are_left_to_others() -> None:
    layer = make_layer(64, 128, has_bias=False, dtype=torch.float16)
    many = torch.ones((tuning.MAX_FEW_TOKENS + 1, 128), dtype=torch.float16, device=DEVICE)

    assert fp8_product.linear(many, *layer, **LIMITS) is None
    assert fp8_product.linear(many[:1].float(), *layer, **LIMITS) is None
    assert fp8_product.linear_silu_mul(many, *layer, **LIMITS) is None
    assert fp8_product.linear(quantized(many), *layer, **LIMITS) is None
    assert fp8_product.linear_silu_mul(quantized(many[:1].float()), *layer, **LIMITS) is None


class Plain:
    """A layer in 16 bits."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, *, has_bias: bool = False) -> None:
        self.weight = (torch.randn(outputs, inputs, generator=random(20)) / inputs**0.5).to(DEVICE, dtype)
        self.bias = torch.randn(outputs, generator=random(21)).to(DEVICE, dtype) if has_bias else None
        self.counters = plain_product.make_counters(outputs, DEVICE)

    def product(self, hidden: torch.Tensor, tile: tuning.ProductTile | None = None) -> torch.Tensor | None:
        return plain_product.linear(hidden, self.weight, self.bias, self.counters, tile=tile)

    def expected(self, hidden: torch.Tensor) -> torch.Tensor:
        product = hidden.float() @ self.weight.float().t()
        return product if self.bias is None else product + self.bias.float()


@dtypes
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "inputs", "outputs"),
    [(1, 512, 128), (3, 304, 80), (16, 256, 64), (16, 1040, 16), (7, 16, 208), (10, 1000, 7), (2, 100, 50)],
)
def test_products_in_sixteen_bits(
    num_tokens: int, inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    layer = Plain(inputs, outputs, dtype, has_bias=has_bias)
    hidden = torch.randn(num_tokens, inputs, generator=random(22)).to(DEVICE, dtype)

    found = layer.product(hidden)

    assert found is not None
    assert_same(found, layer.expected(hidden))
    assert not layer.counters.any(), "the counters are left at zero"


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("dependent_launch", [False, True])
def test_a_product_in_sixteen_bits_is_the_same_however_it_is_cut(splits: int, dependent_launch: bool) -> None:
    layer = Plain(640, 144, torch.float16)
    hidden = torch.randn(9, 640, generator=random(22)).to(DEVICE, torch.float16)
    tile = tuning.ProductTile(64, 128, splits, num_warps=4, num_stages=3, dependent_launch=dependent_launch)

    assert_same(layer.product(hidden, tile), layer.expected(hidden))


def test_rows_of_sixteen_bits_may_lie_apart() -> None:
    layer = Plain(160, 48, torch.float16)
    wide = torch.randn(4, 320, generator=random(22)).to(DEVICE, torch.float16)

    assert_same(layer.product(wide[:, :160]), layer.expected(wide[:, :160]))


def test_other_products_in_sixteen_bits_are_left_to_libraries() -> None:
    layer = Plain(128, 64, torch.float16)
    many = torch.ones((tuning.MAX_PLAIN_TOKENS + 1, 128), dtype=torch.float16, device=DEVICE)
    wide = Plain(16, 64 * tuning.PLAIN_PROGRAMS, torch.float16)

    assert layer.product(many) is None
    assert layer.product(many[:1].float()) is None
    assert layer.product(many[:1].bfloat16()) is None
    assert layer.product(many[:0]).shape == (0, 64)
    assert wide.product(many[:1, :16]) is None, "it needs no splitting"


@pytest.mark.parametrize("num_tokens", [1, tuning.MAX_PLAIN_TOKENS + 1])
def test_layers_of_models_multiply_so_and_as_before(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "plain_product_for", lambda tensor: plain_product)
    shape = linear.LinearShape(
        inputs=160, parts=(linear.LinearPart("part", 48),), has_bias=True, dtype=torch.float16, device=DEVICE
    )
    layer = linear.PlainLinear(shape)
    plain = Plain(160, 48, torch.float16, has_bias=True)
    for slot, tensor in zip(layer.slots("layer"), (plain.weight, plain.bias), strict=True):
        slot.write(tensor)
    hidden = torch.randn(num_tokens, 160, generator=random(22)).to(DEVICE, torch.float16)

    assert_same(layer(hidden), plain.expected(hidden))


class Packed:
    """A weight in 4 bits as a checkpoint has it, and as the kernels take it."""

    def __init__(self, inputs: int, outputs: int, group_size: int, *, act_order: bool = False) -> None:
        num_groups = inputs // group_size
        limits = torch.iinfo(torch.int32)
        self.qweight, self.zeros = (
            torch.randint(limits.min, limits.max, size, dtype=torch.int32, generator=random(seed)).to(DEVICE)
            for seed, size in enumerate([(inputs // 8, outputs), (num_groups, outputs // 8)])
        )
        self.scales = (torch.rand(num_groups, outputs, generator=random(3)) / (8 * inputs**0.5)).half().to(DEVICE)
        self.groups = torch.arange(inputs) // group_size
        if act_order:
            self.groups = self.groups[torch.randperm(inputs, generator=random(4))]
        self.groups = self.groups.to(DEVICE)
        self.order = self.groups.argsort(stable=True)
        self.counters = int4_product.make_counters(outputs, DEVICE)

    def words(self) -> torch.Tensor:
        return int4_product.pack(self.qweight, self.order)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        return gptq.dequantize(self.qweight, self.zeros, self.scales, self.groups, dtype)

    def product(self, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        ordered = hidden[:, self.order]
        return int4_product.linear(ordered, self.words(), self.zeros, self.scales, bias, self.counters)


@dtypes
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "inputs", "outputs", "group_size"),
    [
        (1, 256, 128, 128),
        (3, 512, 72, 32),
        (16, 384, 264, 64),
        (7, 1152, 8, 128),
        (40, 256, 136, 256),
        (64, 128, 64, 128),
    ],
)
def test_products_in_four_bits(
    num_tokens: int, inputs: int, outputs: int, group_size: int, has_bias: bool, dtype: torch.dtype
) -> None:
    packed = Packed(inputs, outputs, group_size)
    hidden = torch.randn(num_tokens, inputs, generator=random(7)).to(DEVICE, dtype)
    bias = torch.randn(outputs, generator=random(8)).to(DEVICE, dtype) if has_bias else None

    found = packed.product(hidden, bias)

    expected = hidden.float() @ packed.weight(dtype).float().t()
    assert found is not None
    assert_same(found, expected if bias is None else expected + bias.float())
    assert not packed.counters.any(), "the counters are left at zero"


def test_inputs_of_a_group_need_not_be_neighbours() -> None:
    packed = Packed(512, 64, 64, act_order=True)
    hidden = torch.randn(2, 512, generator=random(7)).to(DEVICE, torch.float16)

    assert_same(packed.product(hidden), hidden.float() @ packed.weight(torch.float16).float().t())


@pytest.mark.parametrize(("inputs", "outputs", "group_size"), [(256, 72, 128), (384, 8, 32), (256, 64, 256)])
def test_all_weights_at_once(inputs: int, outputs: int, group_size: int) -> None:
    packed = Packed(inputs, outputs, group_size, act_order=True)

    found = int4_product.dequantize(packed.words(), packed.zeros, packed.scales, torch.float16)

    assert torch.equal(found, packed.weight(torch.float16)[:, packed.order])


@pytest.mark.parametrize(
    ("inputs", "group_size", "is_taken"),
    [(128, 128, True), (3584, 3584, True), (256, 32, True), (96, 32, False), (384, 192, False), (128, 8, False)],
)
def test_only_whole_blocks_are_packed(inputs: int, group_size: int, is_taken: bool) -> None:
    assert int4_product.can_pack(inputs=inputs, group_size=group_size) == is_taken


def test_more_tokens_are_left_to_the_dequantised_weight() -> None:
    packed = Packed(128, 64, 128)

    assert packed.product(torch.ones((tuning.MAX_FEW_TOKENS + 1, 128), dtype=torch.float16, device=DEVICE)) is None
    assert packed.product(torch.ones((0, 128), dtype=torch.float16, device=DEVICE)).shape == (0, 64)


def test_a_sum_is_the_same_every_time() -> None:
    packed = Packed(4096, 64, 128)
    layer = make_layer(64, 4096, has_bias=False, dtype=torch.float16)
    plain = Plain(4096, 64, torch.float16)
    hidden = torch.randn(4, 4096, generator=random(7)).to(DEVICE, torch.float16)
    assert tuning.int4_tile(inputs=4096, outputs=64).splits > 1

    first = packed.product(hidden), fp8_product.linear(hidden, *layer, **LIMITS), plain.product(hidden)

    for _ in range(1 if triton.knobs.runtime.interpret else 200):
        assert torch.equal(packed.product(hidden), first[0])
        assert torch.equal(fp8_product.linear(hidden, *layer, **LIMITS), first[1])
        assert torch.equal(plain.product(hidden), first[2])
