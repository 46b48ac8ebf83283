"""GPTQ checkpoints, packed and unpacked here by loops that share nothing with the code under test."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.models.linear import LinearPart, LinearShape
from kvtier.models.loading import load_model
from kvtier.models.quantization.config import GptqConfig
from kvtier.models.quantization.gptq import GptqLinear
from kvtier.testing.tiny_models import save_tiny_model
from tests.support.dense import all_logits

TOKENS = torch.arange(24)


def as_int32(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def pack(numbers: list[int]) -> int:
    """Eight 4-bit numbers, the first in the lowest bits."""
    return sum(number << (4 * place) for place, number in enumerate(numbers))


class Layer:
    """One layer's 4-bit numbers, and what they are worth."""

    def __init__(self, inputs: int, outputs: int, group_size: int, *, act_order: bool, sym: bool, seed: int) -> None:
        chance = random.Random(seed)
        num_groups = 1 if group_size == -1 else inputs // group_size
        self.groups = [number * num_groups // inputs for number in range(inputs)]
        if act_order:
            chance.shuffle(self.groups)
        self.levels = [[chance.randrange(16) for _ in range(outputs)] for _ in range(inputs)]
        self.zeros = [[8 if sym else chance.randrange(16) for _ in range(outputs)] for _ in range(num_groups)]
        scale = torch.tensor(0.25 * inputs**-0.5)
        self.scales = (scale * torch.rand(num_groups, outputs, generator=torch.Generator().manual_seed(seed))).half()

    def tensors(self, name: str, *, offset: int = 0x11111111) -> dict[str, Tensor]:
        """As a checkpoint holds them; `offset` is what the format takes off each word of zero points."""
        inputs, outputs = len(self.levels), len(self.levels[0])
        qweight = [
            [as_int32(pack([self.levels[8 * row + place][column] for place in range(8)])) for column in range(outputs)]
            for row in range(inputs // 8)
        ]
        qzeros = [
            [as_int32(pack(zeros[8 * word : 8 * word + 8]) - offset) for word in range(outputs // 8)]
            for zeros in self.zeros
        ]
        return {
            f"{name}.qweight": torch.tensor(qweight, dtype=torch.int32),
            f"{name}.qzeros": torch.tensor(qzeros, dtype=torch.int32),
            f"{name}.scales": self.scales,
            f"{name}.g_idx": torch.tensor(self.groups, dtype=torch.int32),
        }

    def weight(self) -> Tensor:
        """(outputs, inputs), one number at a time."""
        scales = self.scales.tolist()
        return torch.tensor(
            [
                [
                    (self.levels[row][column] - self.zeros[group][column]) * scales[group][column]
                    for row, group in enumerate(self.groups)
                ]
                for column in range(len(self.levels[0]))
            ]
        )


def save_gptq_model(folder: Path, *, group_size: int, act_order: bool, sym: bool, family: str = "qwen2") -> Path:
    """A GPTQ checkpoint in `folder`/gptq; beside it, in `folder`/plain, the same weights multiplied out."""
    settings: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_layers": 1, "head_dim": 32}
    save_tiny_model(folder / "plain", family, with_tokenizer=False, **settings)
    save_tiny_model(folder / "gptq", family, with_tokenizer=False, **settings)
    plain = load_file(folder / "plain" / "model.safetensors")
    packed = dict(plain)
    for number, name in enumerate(sorted(plain)):
        if not name.endswith("_proj.weight"):
            continue
        outputs, inputs = plain[name].shape
        layer = Layer(inputs, outputs, group_size, act_order=act_order, sym=sym, seed=number)
        plain[name] = layer.weight()
        del packed[name]
        module = name.removesuffix(".weight")
        packed |= layer.tensors(module)
        # Some writers give every layer a bias.
        packed.setdefault(f"{module}.bias", torch.zeros(outputs, dtype=torch.float16))
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, folder / "gptq" / "model.safetensors", metadata={"format": "pt"})
    path = folder / "gptq" / "config.json"
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": act_order, "sym": sym}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return folder / "gptq"


@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("act_order", [False, True], ids=["in-order", "act-order"])
@pytest.mark.parametrize("group_size", [128, 32, -1])
def test_a_gptq_model_is_the_model_of_its_dequantised_weights(
    tmp_path: Path, group_size: int, act_order: bool, sym: bool
) -> None:
    folder = save_gptq_model(tmp_path, group_size=group_size, act_order=act_order, sym=sym)
    plain = load_model(tmp_path / "plain", dtype="float32", device="cpu")

    gptq = load_model(folder, dtype="float32", device="cpu")

    assert gptq.quantization == "gptq"
    torch.testing.assert_close(all_logits(gptq.model, TOKENS), all_logits(plain.model, TOKENS), rtol=0, atol=1e-4)


def test_gate_and_up_may_be_one_tensor(tmp_path: Path) -> None:
    folder = save_gptq_model(tmp_path, group_size=32, act_order=True, sym=True, family="glm")
    plain = load_model(tmp_path / "plain", dtype="float32", device="cpu")

    gptq = load_model(folder, dtype="float32", device="cpu")

    torch.testing.assert_close(all_logits(gptq.model, TOKENS), all_logits(plain.model, TOKENS), rtol=0, atol=1e-4)


def test_biases_that_are_not_zero_are_kept(tmp_path: Path) -> None:
    folder = save_gptq_model(tmp_path, group_size=32, act_order=False, sym=True)
    path = folder / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.bias"
    bias = torch.arange(128).half() / 64
    save_file(load_file(path) | {name: bias}, path, metadata={"format": "pt"})

    layer = load_model(folder, dtype="float32", device="cpu").model.layers[0].mlp

    assert torch.equal(layer.gate_up_proj.bias, torch.cat((torch.zeros(128), bias.float())))
    assert layer.down_proj.bias is None


@pytest.mark.parametrize("offset", [0, 0x11111111], ids=["gptq_v2", "gptq"])
def test_each_format_has_its_own_zero_points(offset: int) -> None:
    layer = Layer(64, 16, 32, act_order=False, sym=False, seed=5)
    layer.zeros[0][:3] = [0, 15, 0]
    shape = LinearShape(
        inputs=64, parts=(LinearPart("o", 16),), has_bias=False, dtype=torch.float32, device=torch.device("cpu")
    )
    linear = GptqLinear(GptqConfig(group_size=32, is_zero_stored_less_one=offset != 0), shape)
    tensors = layer.tensors("o", offset=offset)
    for slot in linear.slots("o"):
        if slot.name in tensors:
            slot.write(tensors[slot.name])

    linear.finish_loading()

    torch.testing.assert_close(linear.weight(), layer.weight(), rtol=0, atol=0)


def test_an_order_that_names_no_group_is_refused(tmp_path: Path) -> None:
    folder = save_gptq_model(tmp_path, group_size=32, act_order=True, sym=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.o_proj.g_idx"][3] = 4
    save_file(tensors, path, metadata={"format": "pt"})

    with pytest.raises(ConfigError, match="g_idx of o_proj names groups outside 0 to 3"):
        load_model(folder, dtype="float32", device="cpu")


def test_fp8_on_top_of_gptq_is_refused(tmp_path: Path) -> None:
    folder = save_gptq_model(tmp_path, group_size=32, act_order=True, sym=True)

    with pytest.raises(ConfigError, match="quantization fp8 cannot be applied to weights that are GPTQ-quantised"):
        load_model(folder, dtype="float32", device="cpu", quantization="fp8")


def test_a_group_that_does_not_divide_the_inputs_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", with_tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}

    with pytest.raises(ConfigError, match=r"inputs in whole groups of 128 .* q_proj is 64 x 64"):
        load_model(config, dtype="float32", device="cpu", load_format="dummy")


@pytest.mark.parametrize("act_order", [False, True])
def test_dummy_weights_run(act_order: bool, tmp_path: Path) -> None:
    folder = save_gptq_model(tmp_path, group_size=32, act_order=act_order, sym=True)
    loaded = load_model(folder, dtype="float32", device="cpu", load_format="dummy")

    assert all_logits(loaded.model, TOKENS).isfinite().all()
