"""vLLM stores what transformers computes, in the namespace of kvtier's own engine, and no other namespace finds it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvtier.models.loading import load_model
from kvtier.testing.servers import ServerProcess
from tests.compat.vllm.engines import (
    answers_without_cache,
    ask_one,
    engine,
    forget_prefixes,
    layout_of,
    model_folder,
    namespaces_at,
    read_blocks,
    save_model,
    tokens_of,
    wait_until_stored,
)

_PROMPT = tokens_of(300)


def _kv_of_transformers(model: Path, tokens: Sequence[int]) -> torch.Tensor:
    """`(2, layers, heads, tokens, head_dim)`"""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        cache = network(torch.tensor([list(tokens)]), use_cache=True).past_key_values
    return torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers], dim=1)


@pytest.mark.parametrize(
    ("family", "dtype", "page_tokens", "tolerance"),
    [("llama", "float32", 32, 1e-4), ("qwen2", "float32", 128, 1e-4), ("llama", "float16", 128, 0.05)],
)
def test_k_and_v_in_the_server_are_those_of_transformers(
    server: ServerProcess, family: str, dtype: str, page_tokens: int, tolerance: float
) -> None:
    model = model_folder(family)
    with engine(model, server.unix, dtype=dtype, page_tokens=page_tokens) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT, dtype=dtype, count=256)

    stored = read_blocks(server.unix, _PROMPT, dtype=dtype).float()

    expected = _kv_of_transformers(model, _PROMPT)[:, :, :, : stored.shape[3]]
    torch.testing.assert_close(stored, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float16"), ("qwen2", "float32")])
def test_the_namespace_is_that_of_kvtiers_own_engine(server: ServerProcess, family: str, dtype: str) -> None:
    model = model_folder(family)
    with engine(model, server.unix, dtype=dtype, settings={"salt": "a tenant"}) as llm:
        ask_one(llm, _PROMPT)

    (known,) = namespaces_at(server.unix)

    loaded = load_model(model, dtype=dtype, device="cpu")
    ours = loaded.namespace_fields(layout_of(known, dtype), salt="a tenant")
    assert known.fields == ours.document()
    assert known.namespace == ours.digest()


def test_new_weights_under_an_old_name_miss(server: ServerProcess, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_model(model, seed=0)
    with engine(model, server.unix) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
    save_model(model, seed=1)
    (expected,) = answers_without_cache(model, [_PROMPT])

    with engine(model, server.unix) as llm:
        answer = ask_one(llm, _PROMPT)

    assert (answer.tokens, answer.num_cached) == (expected, 0)


def test_a_copied_model_folder_hits(server: ServerProcess, tmp_path: Path) -> None:
    save_model(tmp_path / "copy", seed=0)
    with engine(model_folder(seed=0), server.unix) as llm:
        cold = ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)

    with engine(tmp_path / "copy", server.unix) as llm:
        warm = ask_one(llm, _PROMPT)

    assert warm.tokens == cold.tokens
    assert warm.num_cached >= 288


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"settings": {"salt": "another tenant"}}, "another salt"), ({"dtype": "float16"}, "another dtype")],
    ids=["salt", "dtype"],
)
def test_an_engine_of_another_namespace_misses(server: ServerProcess, arguments: dict, reason: str) -> None:
    with engine(model_folder(), server.unix, settings={"salt": "a tenant"}) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)

    with engine(model_folder(), server.unix, **arguments) as llm:
        answer = ask_one(llm, _PROMPT)

    assert answer.num_cached == 0, reason


def test_rope_settings_of_the_command_line_are_part_of_the_namespace(server: ServerProcess) -> None:
    other = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}}
    (expected,) = answers_without_cache(model_folder(), [_PROMPT], **other)
    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)

    with engine(model_folder(), server.unix, **other) as llm:
        answer = ask_one(llm, _PROMPT)

    assert (answer.tokens, answer.num_cached) == (expected, 0)


def test_a_config_from_elsewhere_is_part_of_the_namespace(server: ServerProcess, tmp_path: Path) -> None:
    model = model_folder()
    config = json.loads((model / "config.json").read_text())
    config["rope_theta"] = 50.0
    config["rope_parameters"] = {**config.get("rope_parameters", {}), "rope_theta": 50.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with engine(model, server.unix) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)

    with engine(model, server.unix, hf_config_path=str(tmp_path)) as llm:
        answer = ask_one(llm, _PROMPT)

    assert answer.num_cached == 0
    assert len(namespaces_at(server.unix)) == 2


def test_a_model_without_safetensors_runs_and_is_not_cached(server: ServerProcess, tmp_path: Path) -> None:
    shutil.copytree(model_folder(), tmp_path / "model")
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    torch.save(load_file(weights), tmp_path / "model" / "pytorch_model.bin")
    weights.unlink()

    with engine(tmp_path / "model", server.unix) as llm:
        answer = ask_one(llm, _PROMPT)

    assert [answer.tokens] == answers_without_cache(model_folder(), [_PROMPT])
    assert namespaces_at(server.unix) == []


def test_the_cache_salt_of_a_request_separates_it_from_others(server: ServerProcess) -> None:
    with engine(model_folder(), server.unix) as llm:
        plain = ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
        forget_prefixes(llm)
        first = ask_one(llm, _PROMPT, cache_salt="one")
        wait_until_stored(server.unix, _PROMPT, cache_salt="one")
        forget_prefixes(llm)
        same = ask_one(llm, _PROMPT, cache_salt="one")
        forget_prefixes(llm)
        other = ask_one(llm, _PROMPT, cache_salt="two")

    assert plain.tokens == first.tokens == same.tokens == other.tokens
    assert (first.num_cached, other.num_cached) == (0, 0)
    assert same.num_cached >= 288
