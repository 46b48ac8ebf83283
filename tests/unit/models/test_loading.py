"""From a folder or a bare config to a model, or to one sentence that says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvtier.blocks.weights import weights_identity_of_folder
from kvtier.errors import ConfigError
from kvtier.models.loading import LoadedModel, load_model
from kvtier.models.weight_files import INDEX_FILE, SINGLE_FILE
from kvtier.testing.tiny_models import make_tiny_model, save_tiny_model
from tests.support.dense import all_logits
from tests.support.waiting import LIMIT_S

TOKENS = torch.arange(20)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
CONFIG = make_tiny_model("qwen3").config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}


def load(model: Path | dict[str, Any], **settings: Any) -> LoadedModel:
    return load_model(model, **{"dtype": "float32", "device": "cpu", **settings})


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    edit(tensors)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, "llama", with_tokenizer=False)
    return tmp_path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, "llama", with_tokenizer=False, max_shard_size="60KB")
    return tmp_path


# --- loading -------------------------------------------------------------------------------------------------------


def test_what_a_loaded_model_says_of_itself(folder: Path) -> None:
    loaded = load(str(folder))  # type: ignore[arg-type]

    assert loaded.folder == folder
    assert loaded.dtype == "float32"
    assert loaded.weights_bytes == sum(tensor.nbytes for tensor in load_file(folder / SINGLE_FILE).values())
    assert loaded.weights_identity == weights_identity_of_folder(folder)
    assert loaded.quantization == ""
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_the_dtype_is_the_checkpoints_unless_told(folder: Path) -> None:
    change_json(folder / "config.json", dtype="float16")

    assert load(folder, dtype="auto").dtype == "float16"
    assert load(folder, dtype=torch.bfloat16).model.embed_tokens.weight.dtype is torch.bfloat16


def test_shards_and_one_file_are_the_same_model(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "one", "qwen3", with_tokenizer=False)
    save_tiny_model(tmp_path / "many", "qwen3", with_tokenizer=False, max_shard_size="60KB")

    one, many = load(tmp_path / "one"), load(tmp_path / "many")

    assert (tmp_path / "many" / INDEX_FILE).is_file()
    assert one.weights_identity == many.weights_identity
    assert torch.equal(all_logits(one.model, TOKENS), all_logits(many.model, TOKENS))


def test_progress_counts_every_byte(folder: Path) -> None:
    told: list[tuple[str, int]] = []
    steps: list[int] = []

    @contextmanager
    def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
        told.append((title, total_bytes))
        yield steps.append

    loaded = load(folder, progress=progress)

    assert told == [(f"Loading {folder.name}", loaded.weights_bytes)]
    assert sum(steps) == loaded.weights_bytes
    assert len(steps) > 10


def test_tensors_without_use_are_passed_over(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    change_json(folder / "config.json", tie_word_embeddings=True)

    assert load(folder).model.lm_head is None


def test_positions_are_bounded_and_can_grow(folder: Path) -> None:
    model = load(folder, max_model_len=30).model
    expected = all_logits(model, TOKENS)

    assert model.rope.max_positions == 30
    model.rope.grow(1000)
    assert model.rope.max_positions == 1000
    assert torch.equal(all_logits(model, TOKENS), expected)


def test_dynamic_rope_ends_where_the_config_does(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    save_tiny_model(tmp_path, "llama", with_tokenizer=False, rope_parameters=rope)

    with pytest.raises(ConfigError, match="a model with dynamic rope has at most 512 positions, not 513"):
        load(tmp_path, max_model_len=513)


def test_the_namespace_knows_weights_quantization_and_dtype(folder: Path) -> None:
    loaded = load(folder)
    layout = loaded.config.kv_layout(16, "float32")
    names = {
        loaded.namespace_fields(layout).digest(),
        loaded.namespace_fields(layout, salt="tenant").digest(),
        load(folder, quantization="fp8").namespace_fields(layout).digest(),
        load(folder, dtype="bfloat16").namespace_fields(layout).digest(),
        load(folder, load_format="dummy").namespace_fields(layout).digest(),
    }

    assert len(names) == 5
    assert load(folder).namespace_fields(layout).digest() in names


def test_a_config_can_be_read_without_torch() -> None:
    code = "import sys, kvtier, kvtier.models.config; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=LIMIT_S).returncode == 0


# --- dummy weights -------------------------------------------------------------------------------------------------


def test_dummy_weights_need_a_config_only() -> None:
    loaded = load(CONFIG, load_format="dummy")

    logits = all_logits(loaded.model, TOKENS)

    assert loaded.folder is None
    assert logits.shape == (20, CONFIG["vocab_size"])
    assert 0.1 < float(logits.std()) < 10


def test_a_seed_gives_the_same_dummy_weights_and_another_seed_others() -> None:
    first, again, other = (load(CONFIG, load_format="dummy", seed=seed) for seed in (1, 1, 2))

    assert first.weights_identity == again.weights_identity != other.weights_identity
    assert torch.equal(first.model.embed_tokens.weight, again.model.embed_tokens.weight)
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_dummy_weights_of_a_folder_read_no_weight_file(folder: Path) -> None:
    (folder / SINGLE_FILE).write_bytes(b"broken")

    assert load(folder, load_format="dummy").folder == folder


@pytest.mark.parametrize("family", ["glm4", "llama"])
def test_dummy_weights_for_any_family_and_fp8(family: str) -> None:
    model = make_tiny_model(family)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}

    assert all_logits(load(config, load_format="dummy", quantization="fp8").model, TOKENS).isfinite().all()


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "int8"}, "dtype must be auto or one of bfloat16, float16, float32, not int8"),
        ({"load_format": "pickle"}, "load_format must be auto or dummy, not 'pickle'"),
        ({"quantization": "int3"}, "quantization must be fp8 or none, not 'int3'"),
        ({"max_model_len": 0}, "max_model_len must be positive, not 0"),
        ({"device": "toaster"}, "the device toaster cannot be used: "),
    ],
)
def test_settings_that_cannot_work_are_refused(folder: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, **settings)

    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_bare_config_has_no_weights() -> None:
    with pytest.raises(ConfigError, match="a bare model config has no weights: load it with load_format dummy"):
        load(CONFIG)


def test_missing_folders_and_files_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no model folder .*absent"):
        load(folder / "absent")
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors files: there are no weights to load"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load(folder)


def test_several_files_without_an_index_are_refused(shards: Path) -> None:
    (shards / INDEX_FILE).unlink()

    with pytest.raises(ConfigError, match=rf"has \d+ \*\.safetensors files but no {INDEX_FILE}"):
        load(shards)


def test_a_missing_shard_is_named(shards: Path) -> None:
    gone = sorted(shards.glob("*.safetensors"))[1]
    gone.unlink()

    with pytest.raises(ConfigError, match=rf"{INDEX_FILE} names {gone.name}, which is not in the folder"):
        load(shards)


def test_an_index_that_names_absent_tensors_is_refused(shards: Path) -> None:
    index = shards / INDEX_FILE
    weight_map = json.loads(index.read_text())["weight_map"]
    change_json(index, weight_map={**weight_map, "model.extra": weight_map[Q_PROJ]})

    with pytest.raises(ConfigError, match=r"says that model\.extra is in model-.*\.safetensors, but it is not"):
        load(shards)


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ({}, "weight_map is empty"),
        ([], "weight_map must be a JSON object, not \\[\\]"),
        ({"a": 3}, "the file of a must be a file name, not 3"),
        ({"a": "../b.safetensors"}, "the file of a must be a file name, not '../b.safetensors'"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(shards: Path, weight_map: object, sentence: str) -> None:
    change_json(shards / INDEX_FILE, weight_map=weight_map)

    with pytest.raises(ConfigError, match=sentence):
        load(shards)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:4], "it is shorter than 8 bytes"),
        (lambda data: data[:100], "it ends inside its header"),
        (lambda data: data[:-1], r"it should hold \d+ bytes of tensors, but holds \d+"),
        (lambda data: data + b"x", r"it should hold \d+ bytes of tensors, but holds \d+"),
        (lambda data: b"\xff" * 8 + data[8:], r"its header claims \d+ bytes"),
        (lambda data: data[:8] + b"}" + data[9:], "Expecting value"),
        (lambda data: data.replace(b'"shape":[64,64]', b'"shape":[64,63]', 1), "do not agree"),
        (lambda data: data.replace(b'"dtype"', b'"dtypo"', 1), "'dtype'"),
    ],
    ids=["empty", "header-cut", "cut", "longer", "no-header", "no-json", "shape", "key"],
)
def test_a_broken_file_is_told_apart(folder: Path, damage: Callable[[bytes], bytes], reason: str) -> None:
    path = folder / SINGLE_FILE
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(ConfigError, match=rf"model\.safetensors cannot be read as safetensors: .*{reason}"):
        load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(Q_PROJ))

    with pytest.raises(ConfigError, match=rf"the weights in .* lack the tensor {Q_PROJ}"):
        load(folder)


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.0.adapter.weight": torch.ones(2)}))

    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM has no place for the tensor model\.layers\.0\.adapter\.weight in "
    ):
        load(folder)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({Q_PROJ: torch.ones(63, 64)}))

    with pytest.raises(ConfigError) as caught:
        load(folder)

    assert f"the tensor {Q_PROJ} in " in str(caught.value)
    assert "has the shape [63, 64], but its config.json asks for [64, 64]" in str(caught.value)


def test_a_tensor_of_whole_numbers_is_no_weight(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({Q_PROJ: torch.ones(64, 64, dtype=torch.int32)}))

    with pytest.raises(ConfigError, match="must hold floating point numbers, not I32"):
        load(folder)
