"""LoRA adapters: blocks of one are found with that one only, whatever its name, id and folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm import LLM
from vllm.lora.request import LoRARequest

from kvtier.testing.servers import ServerProcess
from tests.compat.vllm.engines import (
    HEAD_DIM,
    KV_HEADS,
    NUM_LAYERS,
    Answer,
    ask_one,
    engine,
    forget_prefixes,
    greedy,
    model_folder,
    tokens_of,
)

_PROMPT = tokens_of(300, seed=3)
_RANK = 8
_WITH_ADAPTERS = {"enable_lora": True, "max_lora_rank": _RANK, "max_loras": 2}


def _save_adapter(folder: Path, *, alpha: int = 8, seed: int = 0, as_safetensors: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    dice = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        for name, num_heads in (("q_proj", 4), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = 0.3 * torch.randn(_RANK, 4 * HEAD_DIM, generator=dice)
            tensors[f"{place}.lora_B.weight"] = 0.3 * torch.randn(num_heads * HEAD_DIM, _RANK, generator=dice)
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": alpha,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if as_safetensors:
        save_file(tensors, folder / "adapter_model.safetensors")
    else:
        torch.save(tensors, folder / "adapter_model.bin")
    return folder


def _ask(llm: LLM, adapter: LoRARequest) -> Answer:
    """After which everything that is kept of it is in the server, and nothing in vLLM."""
    (output,) = llm.generate([{"prompt_token_ids": _PROMPT}], greedy(12), use_tqdm=False, lora_request=adapter)
    forget_prefixes(llm)
    return Answer(list(output.outputs[0].token_ids), output.num_cached_tokens or 0)


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, list[int]]:
    """vLLM's own answers, by adapter."""
    adapters = {
        "one": _save_adapter(tmp_path / "one"),
        "louder": _save_adapter(tmp_path / "louder", alpha=64),
        "other": _save_adapter(tmp_path / "other", seed=7),
        "pickled": _save_adapter(tmp_path / "pickled", as_safetensors=False),
    }
    with engine(model_folder(), **_WITH_ADAPTERS) as llm:
        return {
            name: _ask(llm, LoRARequest(name, number, str(folder))).tokens
            for number, (name, folder) in enumerate(adapters.items(), 1)
        }


def test_an_adapter_hits_its_own_blocks_only(
    server: ServerProcess, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    with engine(model_folder(), server.unix, **_WITH_ADAPTERS) as llm:
        plain = ask_one(llm, _PROMPT)
        forget_prefixes(llm)
        one = LoRARequest("one", 1, str(tmp_path / "one"))
        first, second = _ask(llm, one), _ask(llm, one)
        louder = _ask(llm, LoRARequest("louder", 2, str(tmp_path / "louder")))

    assert plain.tokens != first.tokens
    assert (first.tokens, first.num_cached) == (expected["one"], 0)
    assert (second.tokens, second.num_cached) == (expected["one"], 288)
    assert (louder.tokens, louder.num_cached) == (expected["louder"], 0)


def test_an_adapter_that_is_replaced_in_place_misses(
    server: ServerProcess, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    folder = _save_adapter(tmp_path / "changing")
    with engine(model_folder(), server.unix, **_WITH_ADAPTERS) as llm:
        before = _ask(llm, LoRARequest("changing", 1, str(folder)))
        _save_adapter(folder, seed=7)
        after = _ask(llm, LoRARequest("changing", 1, str(folder), load_inplace=True))

    assert before.tokens == expected["one"]
    assert (after.tokens, after.num_cached) == (expected["other"], 0)


def test_an_adapter_that_cannot_be_told_from_others_is_not_cached(
    server: ServerProcess, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    with engine(model_folder(), server.unix, **_WITH_ADAPTERS) as llm:
        adapter = LoRARequest("pickled", 1, str(tmp_path / "pickled"))
        answers = [_ask(llm, adapter) for _ in range(2)]

    assert [answer.tokens for answer in answers] == [expected["pickled"]] * 2
    assert [answer.num_cached for answer in answers] == [0, 0]
