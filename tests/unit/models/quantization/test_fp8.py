"""Linear layers in 8-bit floats against their definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels import tuning
from kvtier.kernels.quantized_rows import QuantizedRows
from kvtier.models.fused_operations import add_rms_norm, rms_norm
from kvtier.models.linear import LinearPart, LinearShape, PlainLinear
from kvtier.models.loading import load_model
from kvtier.models.quantization.fp8 import Fp8Linear, quantize_rows, quantized_rms_norm
from kvtier.testing.tiny_models import FAMILIES, save_tiny_model
from tests.support.dense import all_logits


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference_quantize(row: list[float]) -> list[float]:
    """What a row is worth after a round trip through 8-bit floats with one scale."""
    scale = max(max(map(abs, row)) / 448, 1e-12)
    return [float(torch.tensor(value / scale).to(torch.float8_e4m3fn)) * scale for value in row]


def round_trip(tensor: Tensor) -> Tensor:
    """`reference_quantize` for every row at once."""
    scales = (tensor.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return (tensor / scales).to(torch.float8_e4m3fn).float() * scales


def test_a_row_is_quantised_by_its_largest_number() -> None:
    values = rows(5, 32) * torch.tensor([1e-3, 1.0, 50.0, 1e4, 0.0])[:, None]

    quantized, scales = quantize_rows(values)

    expected = torch.tensor([reference_quantize(row) for row in values.tolist()])
    torch.testing.assert_close(quantized.float() * scales, expected)
    assert quantized.float().abs().amax(-1).tolist() == [448, 448, 448, 448, 0]


def test_the_product_is_that_of_the_quantised_numbers() -> None:
    shape = LinearShape(
        inputs=32,
        parts=(LinearPart("q", 16), LinearPart("k", 32)),
        has_bias=True,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    layer = Fp8Linear(shape)
    tensors = {"q.weight": rows(16, 32), "q.bias": rows(16), "k.weight": rows(32, 32, seed=1), "k.bias": rows(32)}
    for slot in layer.slots("qk"):
        slot.write(tensors.pop(slot.name))
    hidden = rows(3, 32, seed=2)

    found = layer(hidden)

    weight = torch.tensor([reference_quantize(row) for row in torch.cat((rows(16, 32), rows(32, 32, seed=1))).tolist()])
    inputs = torch.tensor([reference_quantize(row) for row in hidden.tolist()])
    assert not tensors
    torch.testing.assert_close(found, inputs @ weight.t() + torch.cat((rows(16), rows(32))))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_fp8_is_the_model_with_quantised_weights_and_inputs(tmp_path: Path, family: str) -> None:
    reference = save_tiny_model(tmp_path, family, with_tokenizer=False)
    for name, module in reference.named_modules():
        if name.endswith("_proj"):
            module.weight.data = round_trip(module.weight.data)
            module.register_forward_pre_hook(lambda module, inputs: (round_trip(inputs[0]),))
    tokens = torch.arange(24)
    with torch.inference_mode():
        expected = reference(tokens[None], use_cache=False).logits[0]

    loaded = load_model(tmp_path, dtype="float32", device="cpu", quantization="fp8")
    found = all_logits(loaded.model, tokens)

    # Not closer: a last bit that differs may round an input to its other neighbour.
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert loaded.quantization == "fp8"
    assert isinstance(loaded.model.lm_head, PlainLinear)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_quantises_is_the_norm_quantised(dtype: torch.dtype, has_residual: bool) -> None:
    hidden, residual, weight = rows(5, 48).to(dtype), rows(5, 48, seed=1).to(dtype), rows(48, seed=2).to(dtype)

    found, total = quantized_rms_norm(hidden, residual if has_residual else None, weight, 1e-6)

    normed, expected_total = add_rms_norm(hidden, residual, weight, 1e-6)
    if not has_residual:
        normed, expected_total = rms_norm(hidden, weight, 1e-6), hidden
    values, scales = quantize_rows(normed)
    assert torch.equal(found.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found.scales, scales)
    assert torch.equal(total, expected_total)
    assert found.dtype is dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_who_quantises_a_normalised_row_changes_no_bit(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, family, with_tokenizer=False)
    model = load_model(tmp_path, dtype="bfloat16", device="cpu", quantization="fp8").model
    tokens = torch.arange(24)
    taken: list[type] = []
    for name, layer in model.named_modules():
        if name.endswith(("qkv_proj", "gate_up_proj")):
            layer.register_forward_pre_hook(lambda _, inputs: taken.append(type(inputs[0])))

    monkeypatch.setattr(tuning, "NORMS_QUANTIZE", True)
    found = all_logits(model, tokens)
    by_norms = set(taken)
    taken.clear()
    monkeypatch.setattr(tuning, "NORMS_QUANTIZE", False)

    assert torch.equal(all_logits(model, tokens), found)
    assert (by_norms, set(taken)) == ({QuantizedRows}, {Tensor})


def test_a_weight_takes_one_byte(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", with_tokenizer=False)

    plain = load_model(tmp_path, dtype="float32", device="cpu")
    fp8 = load_model(tmp_path, dtype="float32", device="cpu", quantization="fp8")

    num_weights = sum(layer.weight.numel() for layer in fp8.model.modules() if isinstance(layer, Fp8Linear))
    num_scales = sum(layer.scales.numel() for layer in fp8.model.modules() if isinstance(layer, Fp8Linear))
    assert plain.weights_bytes - fp8.weights_bytes == 3 * num_weights - 4 * num_scales


def test_sizes_that_the_hardware_does_not_take_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", with_tokenizer=False, intermediate_size=90)

    with pytest.raises(ConfigError, match="multiples of 16, gate_proj is 180 x 64"):
        load_model(tmp_path, dtype="float32", device="cpu", quantization="fp8")
