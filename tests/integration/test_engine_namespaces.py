"""Other weights, types, rope or salt share nothing, and an explanation names the field that differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvtier
from kvtier.blocks.full_identity import full_identity_of_folder
from kvtier.blocks.weights import weights_identity_of_folder
from kvtier.models.loading import load_model
from kvtier.testing.servers import cache_server
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.tiers.explaining import explain, explain_request
from kvtier.tiers.explanation import MatchEnd
from tests.support.tiered_engines import Question, answers, ask, cached, cold, open_engine, settled, tokens
from tests.support.waiting import CALL_S, wait_until

torch.set_num_threads(1)

PROMPT = tokens(1, 100)
ASKED = [Question(PROMPT)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "one" / "model"
    save_tiny_model(path, "qwen3")
    return path


def _other(tmp_path: Path) -> Path:
    """Another folder of the same name."""
    return tmp_path / "other" / "model"


def _other_weights(model: Path, tmp_path: Path) -> dict[str, Any]:
    save_tiny_model(_other(tmp_path), "qwen3", seed=1)
    return {"model": _other(tmp_path)}


def _one_other_weight(model: Path, tmp_path: Path) -> dict[str, Any]:
    """A fine-tune that changed one matrix."""
    shutil.copytree(model, _other(tmp_path))
    [path] = _other(tmp_path).glob("*.safetensors")
    weights = load_file(path)
    weights["model.layers.0.self_attn.k_proj.weight"] += 0.25
    save_file(weights, path, metadata={"format": "pt"})
    return {"model": _other(tmp_path)}


def _other_rope(model: Path, tmp_path: Path) -> dict[str, Any]:
    shutil.copytree(model, _other(tmp_path))
    path = _other(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    if "rope_parameters" in config:
        config["rope_parameters"]["rope_theta"] = 123456.0
    else:
        config["rope_theta"] = 123456.0
    path.write_text(json.dumps(config))
    return {"model": _other(tmp_path)}


def _scaled_rope(model: Path, tmp_path: Path) -> dict[str, Any]:
    shutil.copytree(model, _other(tmp_path))
    path = _other(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    scaling = {"rope_type": "linear", "factor": 2.0}
    if "rope_parameters" in config:
        config["rope_parameters"] |= scaling
    else:
        config["rope_scaling"] = scaling
    path.write_text(json.dumps(config))
    return {"model": _other(tmp_path)}


def _other_dtype(model: Path, tmp_path: Path) -> dict[str, Any]:
    return {"dtype": "bfloat16"}


def _salt(model: Path, tmp_path: Path) -> dict[str, Any]:
    return {"salt": "a tenant"}


def _other_block_size(model: Path, tmp_path: Path) -> dict[str, Any]:
    return {"block_size": 8}


def _fp8(model: Path, tmp_path: Path) -> dict[str, Any]:
    return {"quantization": "fp8"}


CHANGES: dict[str, tuple[Callable[[Path, Path], dict[str, Any]], str]] = {
    "other weights": (_other_weights, "weights"),
    "one other weight": (_one_other_weight, "weights"),
    "rope": (_other_rope, "rope"),
    "scaled rope": (_scaled_rope, "rope"),
    "dtype": (_other_dtype, "dtype"),
    "salt": (_salt, "salt"),
    "block size": (_other_block_size, "block_tokens"),
    "fp8": (_fp8, "quantization"),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("change", list(CHANGES))
def test_an_engine_that_differs_finds_nothing_and_is_told_in_what(model: Path, tmp_path: Path, change: str) -> None:
    make, field = CHANGES[change]
    settings = make(model, tmp_path)
    other = settings.pop("model", model)
    with open_engine(other, block_manager="naive", **settings) as llm:
        expected = ask(llm, ASKED)
    with cache_server() as server:
        with open_engine(model, cache_server=server.unix) as llm:
            ask(llm, ASKED)
            settled(llm)

        with open_engine(other, cache_server=server.unix, **settings) as llm:
            [found] = ask(llm, ASKED)
            assert cached(found.outputs[0]) == {}
            assert answers([found]) == answers(expected)
            assert llm.engine.explain(found.request_id).cached_tokens.get("server", 0) == 0
            fields = llm.engine.parts.namespace_fields
            settled(llm)
            with kvtier.connect(server.unix, timeout_s=CALL_S) as operator:
                wait_until(lambda: operator.noted(found.request_id))
                noted = explain_request(operator, found.request_id)
                assert noted is not None
                assert noted.reason is MatchEnd.OTHER_NAMESPACE, noted.sentence()
                assert field in noted.detail, noted.sentence()
                again = explain(operator, fields, PROMPT)
                assert again.reason is MatchEnd.ALL, "it has stored its own by now"

        with open_engine(model, cache_server=server.unix) as llm:
            [back] = ask(llm, ASKED)
            assert cached(back.outputs[0]) == {"server": 96}, "both are cached beside each other"
            assert answers([back]) == answers(cold(model, ASKED))


def test_a_copy_of_the_folder_finds_everything(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, _other(tmp_path), copy_function=shutil.copyfile)
    with cache_server() as server:
        with open_engine(model, cache_server=server.unix) as llm:
            ask(llm, ASKED)
        with open_engine(_other(tmp_path), cache_server=server.unix) as llm:
            [found] = ask(llm, ASKED)
            assert cached(found.outputs[0]) == {"server": 96}


def test_another_lora_is_another_namespace(model: Path) -> None:
    with cache_server() as server:
        with open_engine(model, cache_server=server.unix) as llm:
            ask(llm, ASKED)
            settled(llm)
            fields = replace(llm.engine.parts.namespace_fields, lora="an adapter")
            with kvtier.connect(server.unix, layout=fields.layout, namespace=fields, timeout_s=CALL_S) as client:
                assert client.match(client.hashes(PROMPT)).num_blocks == 0
                explained = explain(client, fields, PROMPT)
                assert explained.reason is MatchEnd.OTHER_NAMESPACE
                assert "differs in lora" in explained.detail


def test_the_full_identity_has_a_namespace_of_its_own_and_the_sampled_one_keeps_its(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", num_layers=1)
    sampled, full = (load_model(tmp_path, device="cpu", identity=kind) for kind in ("sampled", "full"))
    assert sampled.weights_identity == weights_identity_of_folder(tmp_path)
    assert full.weights_identity == full_identity_of_folder(tmp_path) != sampled.weights_identity
