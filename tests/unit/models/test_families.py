"""Every family computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier.models.config import ARCHITECTURES
from kvtier.models.families import MODELS
from kvtier.models.loading import load_model
from kvtier.testing.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model
from tests.support.dense import all_logits, greedy

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}


def prompt(length: int = 40) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(7))


def check(folder: Path, family: str, **overrides: Any) -> None:
    """Loaded by us and run by transformers, the checkpoint gives the same logits and the same greedy answer."""
    reference = save_tiny_model(folder, family, with_tokenizer=False, **overrides)
    model = load_model(folder, dtype="float32", device="cpu").model
    tokens = prompt()
    with torch.inference_mode():
        expected = reference(tokens[None], use_cache=False).logits[0]
        answer = tokens[None]
        for _ in range(6):
            following = reference(answer, use_cache=False).logits[0, -1].argmax()
            answer = torch.cat((answer, following.view(1, 1)), dim=1)

    found = all_logits(model, tokens)

    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert greedy(model, tokens, 6) == answer[0, len(tokens) :].tolist()


def test_every_known_architecture_has_a_class() -> None:
    assert tuple(MODELS) == ARCHITECTURES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    check(tmp_path, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings_serve_as_the_head(tmp_path: Path, family: str) -> None:
    check(tmp_path, family, tie_word_embeddings=True)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "glm"])
def test_a_head_may_be_wider_than_its_share_of_the_hidden_state(tmp_path: Path, family: str) -> None:
    check(tmp_path, family, head_dim=32)


def test_weights_may_be_spread_over_shards(tmp_path: Path) -> None:
    check(tmp_path, "qwen2", max_shard_size="40KB")

    assert len(list(tmp_path.glob("*.safetensors"))) > 3


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("glm", {"attention_bias": False}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("glm4", {"rope_parameters": {"rope_theta": 300.0, "rope_type": "default", "partial_rotary_factor": 0.25}}),
    ],
    ids=["llama-biases", "qwen3-biases", "glm-no-bias", "no-sharing", "one-kv-head", "quarter-rotary"],
)
def test_what_a_config_may_vary(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    check(tmp_path, family, **overrides)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mistral", {"sliding_window": 9}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
    ],
    ids=["mistral", "qwen2", "qwen3"],
)
def test_windows_are_those_of_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    check(tmp_path, family, **overrides)


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("qwen2", {"rope_type": "default", "rope_theta": 1e6}),
        ("llama", {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}),
        ("llama", {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}),
        ("llama", LLAMA3),
        ("qwen2", YARN),
        ("qwen3", {**YARN, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2, "truncate": False}),
        ("llama", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1}),
        ("glm", {**LLAMA3, "partial_rotary_factor": 0.5}),
    ],
    ids=["default", "linear", "dynamic", "llama3", "yarn", "yarn-tuned", "yarn-mscale", "llama3-interleaved"],
)
def test_ropes_are_those_of_transformers(tmp_path: Path, family: str, rope: dict[str, Any]) -> None:
    check(tmp_path, family, rope_parameters=rope)


def test_a_prompt_in_pieces_gives_the_hidden_states_of_the_whole(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", with_tokenizer=False)
    model = load_model(tmp_path, dtype="float32", device="cpu").model
    tokens = prompt(20)

    whole = greedy(model, tokens, 3)

    assert greedy(model, torch.cat((tokens, torch.tensor(whole[:2]))), 1) == whole[2:]


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, "qwen3", with_tokenizer=False).bfloat16()
    model = load_model(tmp_path, dtype="bfloat16", device="cpu").model
    with torch.inference_mode():
        expected = reference(prompt()[None], use_cache=False).logits[0].float()

    found = all_logits(model, prompt())

    assert (found - expected).norm() < 0.03 * expected.norm()
