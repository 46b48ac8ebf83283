"""Model folders of any content are read, or refused in one sentence, and never anything else."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from kvtier.blocks.weights import weights_identity_of_folder
from kvtier.deploy.check.model_needs import read_model_needs
from kvtier.engine.config import EngineConfig
from kvtier.errors import ConfigError
from kvtier.models.checkpoint import Checkpoint
from kvtier.models.config import read_config
from kvtier.models.tokenizer import Tokenizer
from kvtier.testing.tiny_models import save_tiny_model
from tests.support.fuzzing import SOAK_TIMES, as_json, seeds, spoiled_bytes, spoiled_value, told

_NUM_CASES = 2000
_NUM_TOKENIZER_CASES = 300
_WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen2", num_layers=1)
    return folder


def _is_said_well(error: ConfigError) -> None:
    assert str(error).isprintable(), f"a terminal would obey {str(error)!r}"
    assert len(str(error)) < 3000


def _spoil_config(rng: random.Random, folder: Path) -> None:
    path = folder / rng.choice(("config.json", "config.json", "generation_config.json"))
    raw = path.read_bytes()
    if rng.random() < 0.3:
        path.write_bytes(spoiled_bytes(rng, raw))
    else:
        value: Any = json.loads(raw) | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "layer_types": None}
        for _ in range(rng.randrange(1, 4)):
            value = spoiled_value(rng, value)
        path.write_bytes(as_json(value))


def _spoil_weights(rng: random.Random, folder: Path) -> None:
    path = folder / _WEIGHTS
    raw = path.read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", raw)
    header: Any = json.loads(raw[8 : 8 + header_bytes])
    if rng.random() < 0.4:
        path.write_bytes(spoiled_bytes(rng, raw[: 8 + header_bytes]) + raw[8 + header_bytes :])
        return
    name = rng.choice(sorted(header))
    header[name] = spoiled_value(rng, header[name])
    spoiled = as_json(header)
    path.write_bytes(struct.pack("<Q", len(spoiled)) + spoiled + raw[8 + header_bytes :])


def _spoil_index(rng: random.Random, folder: Path) -> None:
    index: Any = {"metadata": {"total_size": 1}, "weight_map": {"model.norm.weight": _WEIGHTS}}
    (folder / "model.safetensors.index.json").write_bytes(as_json(spoiled_value(rng, index)))


def _try(model: Path, folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder)
    spoil = rng.choice((_spoil_config, _spoil_weights, _spoil_index))
    spoil(rng, folder)
    for read in (
        lambda: read_config(folder).kv_layout(),
        lambda: read_model_needs(EngineConfig(model=str(folder))),
        lambda: weights_identity_of_folder(folder),
        lambda: Checkpoint(folder),
    ):
        with told(seed, spoil.__name__):
            try:
                read()
            except ConfigError as error:
                _is_said_well(error)


@pytest.mark.scaled
def test_any_folder_is_read_or_refused_in_a_sentence(model: Path, tmp_path: Path) -> None:
    for seed in seeds(_NUM_CASES):
        _try(model, tmp_path / "model", seed)


def _try_tokenizer(model: Path, folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / rng.choice(("tokenizer.json", "tokenizer_config.json"))
    if rng.random() < 0.5:
        path.write_bytes(spoiled_bytes(rng, path.read_bytes()))
    else:
        path.write_bytes(as_json(spoiled_value(rng, json.loads(path.read_bytes()))))
    with told(seed, path.name):
        try:
            tokenizer = Tokenizer(folder)
        except ConfigError as error:
            _is_said_well(error)
        else:
            if not tokenizer.is_absent:
                tokenizer.decode(tokenizer.encode("the end")[:8])


@pytest.mark.scaled
@pytest.mark.filterwarnings("ignore")
def test_any_tokenizer_is_loaded_or_refused_in_a_sentence(model: Path, tmp_path: Path) -> None:
    for seed in seeds(_NUM_TOKENIZER_CASES):
        _try_tokenizer(model, tmp_path / "model", seed)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_any_of_many_folders_is_read_or_refused_in_a_sentence(model: Path, tmp_path: Path) -> None:
    for seed in range(_NUM_CASES, SOAK_TIMES * _NUM_CASES):
        _try(model, tmp_path / "model", seed)
    for seed in range(_NUM_TOKENIZER_CASES, SOAK_TIMES * _NUM_TOKENIZER_CASES):
        _try_tokenizer(model, tmp_path / "model", seed)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number up to 4096, not 1000000000"),
        ({"hidden_size": 10**12}, "hidden_size must be a whole number up to 1048576, not 1000000000000"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number, not 1"),
        ({"eos_token_id": list(range(5000))}, "eos_token_id must be at most 1024 token ids, not 5000"),
        ({"architectures": ["\x1b]0;title\x07"]}, "the architecture \\x1b]0;title\\x07 is not known"),
        ({"hidden_act": "x" * 10**6}, "hidden_act must be silu, not 'xxx"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_config_cannot_mean_is_one_sentence(
    model: Path, tmp_path: Path, fields: dict[str, Any], sentence: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path)
    assert sentence in str(caught.value)
    _is_said_well(caught.value)
