"""Only on a GPU: captured graphs, 8-bit products in hardware, dummy weights made in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvtier.kernels import tuning
from kvtier.kernels.rotation import Rotation, rotate
from kvtier.models.fused_operations import silu_mul
from kvtier.models.linear import LinearPart, LinearShape, PlainLinear
from kvtier.models.loading import load_model
from kvtier.models.quantization.config import GptqConfig
from kvtier.models.quantization.fp8 import Fp8Linear, quantize_rows, scaled_matmul
from kvtier.models.quantization.gptq import GptqLinear
from kvtier.models.slot import SlotKind
from kvtier.testing.tiny_models import FAMILIES, save_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SEVEN_B = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
}


def own_values(layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation) -> Tensor:
    """An attention in which each token sees itself only, and its position: enough to run every other operation."""
    turned, _ = rotate(query, key, rotation)
    return (turned + value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)).flatten(1)


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_replays_what_was_captured(tmp_path: Path, family: str, quantization: str | None) -> None:
    save_tiny_model(tmp_path, family, with_tokenizer=False)
    model = load_model(tmp_path, dtype="bfloat16", device="cuda", quantization=quantization).model  # type: ignore[arg-type]
    tokens, positions = torch.arange(16, device="cuda"), torch.arange(16, device="cuda")
    model.logits(model(tokens, positions, own_values))
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        captured = model.logits(model(tokens, positions, own_values))

    tokens.add_(5)
    positions.add_(50)
    graph.replay()

    expected = model.logits(model(tokens, positions, own_values))
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 300])
def test_the_hardware_multiplies_what_the_twin_multiplies(num_tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = quantize_rows(torch.randn(num_tokens, 512, device="cuda", generator=generator))
    weight = quantize_rows(torch.randn(256, 512, device="cuda", generator=generator))

    found = scaled_matmul(*inputs, *weight, dtype)

    on_cpu = [tensor.cpu() for tensor in (*inputs, *weight)]
    expected = scaled_matmul(*on_cpu, torch.float32)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float().cpu(), expected, rtol=0.02, atol=0.02 * float(expected.std()))


@pytest.fixture
def has_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels for a few tokens, whether models use them yet or not."""
    monkeypatch.setattr(tuning, "HAS_QUANTIZED_PRODUCTS", True)
    monkeypatch.setattr(tuning, "HAS_FEW_TOKEN_PRODUCTS", True)


def layer_shape(inputs: int, *outputs: int, has_bias: bool, dtype: torch.dtype) -> LinearShape:
    parts = tuple(LinearPart(f"part{number}", count) for number, count in enumerate(outputs))
    return LinearShape(inputs=inputs, parts=parts, has_bias=has_bias, dtype=dtype, device=torch.device("cuda"))


@pytest.mark.usefixtures("has_products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16, 17, 64, 65])
@pytest.mark.parametrize(("inputs", "outputs"), [(3584, 4608), (3584, 3584), (18944, 3584), (1040, 208), (48, 16)])
def test_a_few_tokens_are_multiplied_as_many_are(
    inputs: int, outputs: int, num_tokens: int, dtype: torch.dtype
) -> None:
    """The kernel for a few tokens and `_scaled_mm` multiply the same 8-bit numbers."""
    torch.manual_seed(0)
    layer = Fp8Linear(layer_shape(inputs, outputs, has_bias=True, dtype=dtype))
    for slot in layer.slots("layer"):
        slot.write(torch.randn(slot.shape, device="cuda") / inputs**0.5)
    hidden = torch.randn(num_tokens, inputs, device="cuda").to(dtype)

    found = layer(hidden)

    values, value_scales = quantize_rows(hidden)
    product = (values.float() @ layer.weight.float().t()) * value_scales * layer.scales.t() + layer.bias.float()
    torch.testing.assert_close(found.float(), product, rtol=0.02, atol=0.01)
    assert all(torch.equal(layer(hidden), found) for _ in range(20)), "a sum does not depend on timing"


@pytest.mark.usefixtures("has_products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 10, 16, 17])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(3584, 4608), (3584, 3584), (18944, 3584), (1000, 208), (50, 7), (512, 40000)]
)
def test_plain_layers_multiply_a_few_tokens(inputs: int, outputs: int, num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = PlainLinear(layer_shape(inputs, outputs, has_bias=True, dtype=dtype))
    for slot in layer.slots("layer"):
        slot.write(torch.randn(slot.shape, device="cuda") / inputs**0.5)
    hidden = torch.randn(num_tokens, inputs, device="cuda").to(dtype)

    found = layer(hidden)

    expected = hidden.float() @ layer.weight.float().t() + layer.bias.float()
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.01)
    assert all(torch.equal(layer(hidden), found) for _ in range(20)), "a sum does not depend on timing"


@pytest.mark.usefixtures("has_products")
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 10, 64])
def test_launches_that_overlap_change_no_number(
    num_tokens: int, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that read too early, or wrote over what another still reads, would now and then show."""
    config = SEVEN_B | {"num_hidden_layers": 6}
    model = load_model(config, device="cuda", load_format="dummy", max_model_len=4096, quantization=quantization).model  # type: ignore[arg-type]
    tokens, positions = torch.arange(num_tokens, device="cuda"), torch.arange(num_tokens, device="cuda")
    expected = model(tokens, positions, own_values)

    monkeypatch.setattr(tuning, "DEPENDENT_LAUNCHES", True)

    assert torch.equal(model(tokens, positions, own_values), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        captured = model(tokens, positions, own_values)
    with torch.inference_mode():
        for _ in range(50):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, expected)


@pytest.mark.usefixtures("has_products")
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 16, 64, 65, 300])
def test_who_quantises_a_normalised_row_changes_no_bit(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SEVEN_B | {"num_hidden_layers": 4}
    model = load_model(config, device="cuda", load_format="dummy", max_model_len=4096, quantization="fp8").model
    tokens, positions = torch.arange(num_tokens, device="cuda"), torch.arange(num_tokens, device="cuda")
    monkeypatch.setattr(tuning, "NORMS_QUANTIZE", False)
    expected = model(tokens, positions, own_values)

    monkeypatch.setattr(tuning, "NORMS_QUANTIZE", True)

    assert torch.equal(model(tokens, positions, own_values), expected)


@pytest.mark.usefixtures("has_products")
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 33, 64, 100])
def test_gate_and_up_in_eight_bits_are_what_they_are_one_by_one(num_tokens: int) -> None:
    torch.manual_seed(0)
    gate_up = Fp8Linear(layer_shape(3584, 4864, 4864, has_bias=False, dtype=torch.bfloat16))
    for slot in gate_up.slots("layer"):
        slot.write(torch.randn(slot.shape, device="cuda") / 60)
    hidden = torch.randn(num_tokens, 3584, device="cuda").bfloat16()

    gated, peaks = gate_up.gated(hidden)

    expected = silu_mul(gate_up(hidden))
    torch.testing.assert_close(gated, expected, rtol=0.03, atol=0.01)
    if num_tokens <= 64:
        assert peaks is not None
        assert torch.equal(peaks.amax(-1), gated.float().abs().amax(-1))


@pytest.mark.usefixtures("has_products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 64, 300])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize("act_order", [False, True])
def test_packed_gptq_layers_multiply_their_dequantised_weight(
    act_order: bool, group_size: int | None, num_tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    inputs = 3584
    config = GptqConfig(group_size=group_size, has_act_order=act_order)
    layer = GptqLinear(config, layer_shape(inputs, 640, 136, has_bias=True, dtype=dtype))
    size = group_size or inputs
    order = torch.randperm(inputs) if act_order else torch.arange(inputs)
    made = {
        SlotKind.PACKED: lambda shape: torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32),
        SlotKind.ZEROS: lambda shape: torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32),
        SlotKind.SCALES: lambda shape: torch.rand(shape) * 0.005,
        SlotKind.GROUPS: lambda shape: (torch.arange(inputs) // size)[order],
        SlotKind.BIAS: torch.randn,
    }
    for slot in layer.slots("layer"):
        slot.write(made[slot.kind](slot.shape).cuda())
    weight = layer.weight()
    hidden = torch.randn(num_tokens, inputs, device="cuda").to(dtype)

    layer.finish_loading()

    assert layer.counters is not None, "it was packed"
    assert layer.qweight.numel() == weight.numel() // 8
    found = layer(hidden)
    expected = hidden.float() @ weight.float().t() + layer.bias.float()
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
    assert all(torch.equal(layer(hidden), found) for _ in range(20)), "a sum does not depend on timing"


@pytest.mark.usefixtures("has_products")
def test_a_graph_replays_gptq_layers() -> None:
    config = SEVEN_B | {"num_hidden_layers": 2, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    model = load_model(config, device="cuda", load_format="dummy", max_model_len=4096).model
    tokens, positions = torch.arange(4, device="cuda"), torch.arange(4, device="cuda")
    model.logits(model(tokens, positions, own_values))
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        captured = model.logits(model(tokens, positions, own_values))

    tokens.add_(5)
    graph.replay()

    assert torch.equal(captured, model.logits(model(tokens, positions, own_values)))


def test_an_fp8_model_agrees_with_the_cpu(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", with_tokenizer=False)
    tokens = torch.arange(24)
    model = load_model(tmp_path, dtype="float32", device="cpu", quantization="fp8").model
    expected = model.logits(model(tokens, tokens, own_values))
    gpu_model = load_model(tmp_path, dtype="float32", device="cuda", quantization="fp8").model

    found = gpu_model.logits(gpu_model(tokens.cuda(), tokens.cuda(), own_values)).cpu()

    # The hardware returns bfloat16, and a last bit may round the next layer's input to its other neighbour.
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_dummy_weights_of_seven_billion_take_no_more_memory_than_they_are() -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()

    loaded = load_model(SEVEN_B, device="cuda", load_format="dummy", max_model_len=4096)
    torch.cuda.synchronize()

    hidden = loaded.model(torch.arange(8, device="cuda"), torch.arange(8, device="cuda"), own_values)
    logits = loaded.model.logits(hidden)
    print(f"dummy 7B: {loaded.weights_bytes / 1e9:.2f} GB, std {float(logits.std()):.3f}")
    assert torch.cuda.max_memory_allocated() < loaded.weights_bytes + 2.5e9
    assert logits.isfinite().all()


def test_the_cpu_and_the_gpu_agree(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "glm4", with_tokenizer=False)
    tokens = torch.arange(24)
    cpu = load_model(tmp_path, dtype="float32", device="cpu").model
    gpu = load_model(tmp_path, dtype="float32", device="cuda").model

    expected = cpu.logits(cpu(tokens, tokens, own_values))
    found = gpu.logits(gpu(tokens.cuda(), tokens.cuda(), own_values)).cpu()

    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)
