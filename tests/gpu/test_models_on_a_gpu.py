"""What only a GPU can show: captured graphs, 8-bit products in hardware, dummy weights made in place."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvtier.models.fp8 import quantize_rows, scaled_matmul
from kvtier.models.loading import load_model
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


def own_values(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """An attention in which each token sees itself only: enough to run every other operation."""
    return (query * 0 + value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)).flatten(1)


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


def test_an_fp8_model_agrees_with_the_cpu(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", with_tokenizer=False)
    tokens = torch.arange(24)
    model = load_model(tmp_path, dtype="float32", device="cpu", quantization="fp8").model
    expected = model.logits(model(tokens, tokens, own_values))
    gpu_model = load_model(tmp_path, dtype="float32", device="cuda", quantization="fp8").model

    found = gpu_model.logits(gpu_model(tokens.cuda(), tokens.cuda(), own_values)).cpu()

    # The hardware returns bfloat16, and a last bit may round the next layer's input to its other neighbour.
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_dummy_weights_of_seven_billion_are_made_in_seconds() -> None:
    torch.cuda.synchronize()
    started_at = time.monotonic()
    torch.cuda.reset_peak_memory_stats()

    loaded = load_model(SEVEN_B, device="cuda", load_format="dummy", max_model_len=4096)
    torch.cuda.synchronize()

    took_s = time.monotonic() - started_at
    hidden = loaded.model(torch.arange(8, device="cuda"), torch.arange(8, device="cuda"), own_values)
    logits = loaded.model.logits(hidden)
    print(f"dummy 7B: {took_s:.2f} s, {loaded.weights_bytes / 1e9:.2f} GB, std {float(logits.std()):.3f}")
    assert took_s < 20
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
