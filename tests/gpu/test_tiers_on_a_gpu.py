"""The tiers below a GPU: the same tokens from every one of them, whatever else is computed meanwhile."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.engine.config import EngineConfig
from kvtier.engine.engine import Engine
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.request import Request
from kvtier.kernels.paged_batch import PagedArrays, PagedRow
from kvtier.testing.servers import cache_server
from kvtier.transfer.copiers.cuda_copier import CudaCopier, layer_groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
TIERS = ("host", "server", "tcp", "disk", "host and server")
MANAGERS = ("naive", "disable_prefix_caching", "prefix_caching", "yoco")
_ALL_BUT_ONE = 1999
"""Of a fully cached prompt of 2,000 tokens, only the last one is computed."""
_GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def make_engine(folder: Path, **settings: object) -> Engine:
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    values = {
        "device": "cuda",
        "load_format": "dummy",
        "max_model_len": 8192,
        "kv_cache_space": 1 << 30,
        "cuda_graphs": False,
        "always_load": True,
        **settings,
    }
    return Engine(EngineConfig(model=str(folder), **values))  # type: ignore[arg-type]


@contextlib.contextmanager
def tier_settings(tier: str, folder: Path) -> Iterator[dict[str, object]]:
    with contextlib.ExitStack() as stack:
        settings: dict[str, object] = {"swap_space": 1 << 30} if "host" in tier else {}
        if tier != "host":
            options = ["--folder", str(folder / "disk"), "--disk", "2GiB", "--disk-only"] if tier == "disk" else []
            server = stack.enter_context(cache_server(*options, memory="1GiB", tcp=tier == "tcp"))
            settings["cache_server"] = server.tcp if tier == "tcp" else server.unix
            settings["cache_server_token"] = server.token
        yield settings


def test_decodes_in_parts_are_those_of_whole_graphs(tmp_path: Path) -> None:
    """The same hidden states, to the bit, whatever ran in between."""
    engine = make_engine(tmp_path, cuda_graphs=True, max_num_requests=16, swap_space=1 << 28)
    graphs = engine.runner._decode_graphs
    assert graphs is not None
    engine.arena.blocks.normal_()
    order: list[int] = []

    class Arrival:
        def precede(self, layer: int) -> None:
            order.append(layer)
            torch.cuda._sleep(100_000)

    dice = random.Random(5)
    with torch.inference_mode():
        for num_rows in (1, 2, 3, 8, 11, 16):
            rows = [
                PagedRow([dice.randrange(400) for _ in range(30)], 1, 1 + dice.randrange(480)) for _ in range(num_rows)
            ]
            size = graphs.size_for(num_rows)
            assert size is not None
            batch = PagedArrays.lay_out(rows, block_tokens=16, num_padding_rows=size - num_rows)
            tokens = np.array([dice.randrange(32000) for _ in range(num_rows)], np.int64)
            expected = graphs.run(tokens, batch)[:num_rows].clone()
            order.clear()

            found = graphs.run(tokens, batch, [Arrival()])[:num_rows].clone()

            assert torch.equal(found, expected)
            assert order == [group.first_layer + group.num_layers - 1 for group in layer_groups(engine.arena.layout)]
            assert torch.equal(graphs.run(tokens, batch)[:num_rows], expected)
    engine.close()


def prompts_of(seed: int) -> list[list[int]]:
    dice = random.Random(seed)
    trunk = [dice.randrange(32000) for _ in range(2000)]
    return [
        trunk,
        trunk[:1500] + [dice.randrange(32000) for _ in range(333)],
        [dice.randrange(32000) for _ in range(700)],
        [dice.randrange(32000) for _ in range(17)],
        trunk,
    ]


def generate(engine: Engine, prompts: list[list[int]]) -> list[Request]:
    requests = [engine.add(f"r{number}", prompt, _GREEDY)[0] for number, prompt in enumerate(prompts)]
    while engine.has_requests:
        engine.step()
    for number in range(len(prompts)):
        engine.forget(f"r{number}")
    return requests


def tokens_of(requests: list[Request]) -> list[list[int]]:
    return [request.output_tokens for request in requests]


def settle(engine: Engine) -> None:
    assert engine.transfer.traffic is not None
    assert engine.transfer.settle()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("manager", MANAGERS)
def test_tokens_are_those_of_a_cold_run(tmp_path: Path, tier: str, manager: str) -> None:
    prompts = prompts_of(3)
    expected = tokens_of(generate(make_engine(tmp_path, block_manager="naive", schedule="sync"), prompts))
    with tier_settings(tier, tmp_path) as settings:
        for schedule in ("sync", "async-2"):
            engine = make_engine(
                tmp_path,
                block_manager=manager,
                schedule=schedule,
                salt=schedule,
                max_num_batched_tokens=600,
                **settings,
            )
            assert tokens_of(generate(engine, prompts)) == expected
            settle(engine)
            again = generate(engine, prompts)
            assert tokens_of(again) == expected
            if manager in ("naive", "disable_prefix_caching"):
                assert sum(again[0].prefetch.history.loaded_tokens.values()) == _ALL_BUT_ONE
            engine.close()
            if tier == "host":
                continue
            restarted = make_engine(
                tmp_path,
                block_manager=manager,
                schedule=schedule,
                salt=schedule,
                max_num_batched_tokens=600,
                **settings,
            )
            found = generate(restarted, prompts)
            assert tokens_of(found) == expected
            assert sum(found[0].prefetch.history.loaded_tokens.values()) == _ALL_BUT_ONE
            restarted.close()


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("tier", ["host", "server", "tcp"])
def test_loads_beside_decodes_and_aborts(tmp_path: Path, tier: str, has_graphs: bool) -> None:
    """Decoding requests continue while others load or are aborted; no request's tokens change."""
    long_prompts = [prompts_of(seed)[0] for seed in range(8)]
    with tier_settings(tier, tmp_path) as settings:
        engine = make_engine(
            tmp_path,
            block_manager="disable_prefix_caching",
            kv_cache_space=300 << 20,
            cuda_graphs=has_graphs,
            max_num_requests=16,
            **settings,
        )
        expected = tokens_of(generate(engine, long_prompts))
        settle(engine)
        for round_ in range(4):
            decoding = engine.add(f"decoding-{round_}", [1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))[0]
            for _ in range(5):
                engine.step()
            requests = [engine.add(f"r{n}", prompt, _GREEDY)[0] for n, prompt in enumerate(long_prompts)]
            for number in range(3):
                for _ in range(number):
                    engine.step()
                engine.abort(f"r{number}")
            while engine.has_requests:
                engine.step()
            assert decoding.num_outputs == 200
            assert tokens_of(requests)[3:] == expected[3:]
            assert all(sum(request.prefetch.history.loaded_tokens.values()) == _ALL_BUT_ONE for request in requests[3:])
            for number in range(len(long_prompts)):
                engine.forget(f"r{number}")
        engine.close()


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_step_begins_before_the_last_layer_has_arrived(tmp_path: Path, has_graphs: bool) -> None:
    """With graphs it is that of a decode, in parts."""
    (prompt,) = [[random.Random(4).randrange(32000) for _ in range(8000)]]
    engine = make_engine(
        tmp_path,
        block_manager="disable_prefix_caching",
        swap_space=1 << 30,
        cuda_graphs=has_graphs,
        max_num_requests=4,
    )
    assert len(layer_groups(engine.arena.layout)) > 1
    assert engine.transfer.traffic is not None
    assert isinstance(engine.transfer.traffic._copier, CudaCopier)
    engine.transfer.traffic._copier._min_grouped_bytes = 0
    expected = tokens_of(generate(engine, [prompt]))
    settle(engine)
    num_early = 0
    submit = engine.runner.submit

    def watched(step, constrain):  # type: ignore[no-untyped-def]
        nonlocal num_early
        num_early += bool(step.arrivals)
        return submit(step, constrain)

    engine.runner.submit = watched  # type: ignore[method-assign]
    for _ in range(5):
        assert tokens_of(generate(engine, [prompt])) == expected
    assert num_early
    engine.close()
