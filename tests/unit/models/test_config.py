"""What a config.json says, in both generations of its keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError
from kvtier.models.config import ARCHITECTURES, ModelConfig, read_config
from kvtier.models.quantization.config import GptqConfig
from kvtier.models.rope_config import RopeConfig, RopeKind

QWEN2 = {
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
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 28,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}


def qwen2(**changes: Any) -> ModelConfig:
    return read_config({**QWEN2, **changes})


def of(architecture: str, **changes: Any) -> ModelConfig:
    return read_config({**QWEN2, "architectures": [architecture], **changes})


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


# --- what is read --------------------------------------------------------------------------------------------------


def test_a_qwen2_config() -> None:
    config = qwen2()

    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == (
        "Qwen2ForCausalLM",
        28,
        28,
        4,
    )
    assert (config.head_dim, config.dtype, config.bos_token_id) == (128, "bfloat16", 151643)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.has_qk_norm) == (True, False, False, False)
    assert config.rope == RopeConfig(rotary_dim=128, theta=1e6)
    assert config.windows == (None,) * 28
    assert not config.tie_word_embeddings


def test_the_layout_of_its_blocks() -> None:
    assert qwen2().kv_layout(32, "float16") == KvLayout(
        layers=28, kv_heads=4, head_dim=128, dtype="float16", block_tokens=32
    )
    assert qwen2().kv_layout().dtype == "bfloat16"


def test_a_folder_is_read_with_its_generation_config(tmp_path: Path) -> None:
    write(tmp_path, "config.json", QWEN2)
    write(tmp_path, "generation_config.json", {"eos_token_id": [151643, 151645]})

    assert read_config(tmp_path).eos_token_ids == (151643, 151645)


def test_families_fill_in_what_their_configs_leave_unsaid() -> None:
    assert of("Qwen3ForCausalLM").has_qk_norm
    assert of("Qwen3ForCausalLM", hidden_size=64).head_dim == 128
    assert of("LlamaForCausalLM", attention_bias=True).output_bias
    assert not of("MistralForCausalLM", attention_bias=True).qkv_bias
    glm = of("GlmForCausalLM")
    assert (glm.qkv_bias, glm.output_bias) == (True, False)
    assert (glm.rope.rotary_dim, glm.rope.is_interleaved) == (64, True)


def test_heads_default_to_no_sharing() -> None:
    assert of("LlamaForCausalLM", num_key_value_heads=None).num_kv_heads == 28


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_old_and_new_rope_keys_say_the_same(keys: dict[str, Any]) -> None:
    assert qwen2(**keys).rope == RopeConfig(rotary_dim=128, theta=5e5, kind=RopeKind.LINEAR, factor=2.0)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "yarn", "factor": 4.0}, 131072),
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}, 32768),
        ({"type": "yarn", "factor": 1e6}, 1 << 22),
        ({"type": "linear", "factor": 4.0}, 32768),
        (None, 32768),
    ],
)
def test_yarn_lengthens_the_context(scaling: dict[str, object] | None, expected: int) -> None:
    """A config says how long its scaled context is by the factor, or by `max_position_embeddings`, or by both."""
    assert qwen2(rope_scaling=scaling).max_position_embeddings == expected


def test_yarn_without_its_original_length_takes_the_maximum() -> None:
    assert qwen2(rope_scaling={"type": "yarn", "factor": 4.0}).rope.original_max_positions == 32768


@pytest.mark.parametrize(
    ("architecture", "keys", "windows"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, [2, 3]),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, []),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": None}, []),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            [1, 3],
        ),
        ("MistralForCausalLM", {"sliding_window": 64}, [0, 1, 2, 3]),
        ("MistralForCausalLM", {"sliding_window": None}, []),
        ("LlamaForCausalLM", {"sliding_window": 64}, []),
    ],
)
def test_windows(architecture: str, keys: dict[str, Any], windows: list[int]) -> None:
    config = of(architecture, num_hidden_layers=4, **keys)

    assert config.windows == tuple(64 if layer in windows else None for layer in range(4))


def test_mistral_without_the_key_has_the_familys_window() -> None:
    keys = {name: value for name, value in QWEN2.items() if name != "sliding_window"}

    assert read_config({**keys, "architectures": ["MistralForCausalLM"]}).windows == (4096,) * 28


def test_gptq_is_read() -> None:
    assert qwen2(quantization_config=GPTQ).quantization == GptqConfig(group_size=128, has_act_order=True)
    assert qwen2(
        quantization_config={**GPTQ, "group_size": -1, "desc_act": False, "checkpoint_format": "gptq_v2"}
    ).quantization == GptqConfig(group_size=None, is_zero_stored_less_one=False)


def test_the_identity_changes_with_what_changes_the_kv_and_with_nothing_else() -> None:
    same = qwen2(eos_token_id=1, torch_dtype="float16", tie_word_embeddings=True)

    assert same.kv_identity() == qwen2().kv_identity()
    assert qwen2(rope_theta=1e5).kv_identity() != qwen2().kv_identity()
    assert qwen2(quantization_config=GPTQ).kv_identity() != qwen2().kv_identity()
    json.dumps(qwen2(quantization_config=GPTQ).kv_identity())


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, f"GPT2LMHeadModel is not known; known are {', '.join(ARCHITECTURES)}"),
        ({"architectures": None}, "the model config: architectures is missing"),
        ({"architectures": []}, "the model config: architectures is empty"),
        ({"architectures": "Qwen2ForCausalLM"}, "architectures must be a list of texts, not 'Qwen2ForCausalLM'"),
        ({"hidden_size": None}, "the model config: hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size must be a positive whole number, not 'big'"),
        ({"vocab_size": 0}, "vocab_size must be a positive whole number, not 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive whole number, not True"),
        ({"num_key_value_heads": 3}, "num_attention_heads 28 is not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, not 0"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, not 'gelu'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
        ({"torch_dtype": "int8"}, "dtype must be one of bfloat16, float16, float32, not 'int8'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of token ids, not '</s>'"),
        ({"rope_scaling": 3}, "rope_scaling must be a JSON object, not 3"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling: unknown rope type 'mrope'; known are default, linear"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: factor is missing"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "low_freq_factor 4.0 must be below high_freq_factor 4.0",
        ),
        ({"partial_rotary_factor": 0.01}, "must give an even number of rotated dimensions, not 1"),
        (
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types must be 28 of sliding_attention or full_attention, not ['full_attention']",
        ),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers must be a whole number from 0"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not known; known is gptq"),
        ({"quantization_config": {**GPTQ, "bits": 8}}, "quantization_config: bits must be 4, not 8"),
        ({"quantization_config": {**GPTQ, "group_size": 7}}, "group_size must be one of -1, 32, 64, 128, not 7"),
        ({"quantization_config": {**GPTQ, "lm_head": True}}, "lm_head is not supported"),
        (
            {"quantization_config": {**GPTQ, "checkpoint_format": "marlin"}},
            "checkpoint_format must be gptq or gptq_v2, not 'marlin'",
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        qwen2(**changes)

    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_not_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no model folder .*absent"):
        read_config(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json must hold a JSON object, not a list"):
        read_config(tmp_path)


def test_a_wrong_field_is_named_with_its_file(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {**QWEN2, "hidden_size": 0})

    with pytest.raises(ConfigError, match=r"config\.json: hidden_size must be a positive whole number"):
        read_config(tmp_path)
