"""Engines as processes on one server: killed in the middle of stores, and two of them with the same prompts.

A block of a server is whole and right whatever became of who wrote it, a prompt is computed once, and who waits for
somebody else's blocks does not wait for ever.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kvtier
from kvtier import LLM, SamplingParams
from kvtier.blocks.match_end import MatchEnd
from kvtier.client.client import CacheClient
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.tiers.host import HostTier
from tests.support.actors import NOTHING_HELD, held
from tests.support.engine_actors import Child, Nursery, nursery
from tests.support.tiered_engines import (
    BLOCK_BYTES,
    Question,
    ask,
    cached,
    full_blocks,
    open_engine,
    settled,
    tokens,
)
from tests.support.waiting import CALL_S, wait_until

torch.set_num_threads(1)

LONG_TOKENS = 2000
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3", max_position_embeddings=4096)
    return path


@pytest.fixture(scope="module")
def everyone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(tmp_path_factory.mktemp("nursery")) as opened:
        yield opened


@pytest.fixture
def children(everyone: Nursery) -> Iterator[Nursery]:
    yield everyone
    everyone.end_children()


@contextlib.contextmanager
def _client(server: ServerProcess, llm: LLM) -> Iterator[CacheClient]:
    """A client of the engine's own namespace."""
    fields = llm.engine.parts.namespace_fields
    with kvtier.connect(server.unix, layout=fields.layout, namespace=fields, timeout_s=CALL_S) as client:
        yield client


def _settings(server: ServerProcess, transport: str) -> dict[str, object]:
    settings: dict[str, object] = {"cache_server": getattr(server, transport), "kv_cache_space": 400 * BLOCK_BYTES}
    return settings if transport == "unix" else {**settings, "cache_server_token": server.token}


# --- killed in the middle of stores --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_an_engine_killed_in_the_middle_of_stores_leaves_whole_blocks_only(
    model: Path, children: Nursery, transport: str
) -> None:
    _kill_in_the_middle(model, children, transport, num_kills=10)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("seed", range(5))
def test_an_engine_killed_very_often_in_the_middle_of_stores_leaves_whole_blocks_only(
    model: Path, children: Nursery, transport: str, seed: int
) -> None:
    _kill_in_the_middle(model, children, transport, num_kills=60, seed=seed)


def _kill_in_the_middle(model: Path, children: Nursery, transport: str, num_kills: int, seed: int = 0) -> None:
    chance = random.Random(seed)
    num_prompts, num_tokens = 6, 600
    num_compared = num_partial = 0
    with (
        cache_server(memory="64MiB", tcp=True) as server,
        open_engine(model, block_manager="naive", kv_cache_space=400 * BLOCK_BYTES, swap_space=64 << 20) as reference,
        _client(server, reference) as client,
    ):
        for round_ in range(8 * num_kills):
            if round_ >= num_kills and num_partial:
                break  # where the kills fall is chance
            seeds = [seed * 10_000 + round_ * num_prompts + number for number in range(num_prompts)]
            num_connections = client.stats()["connections"]
            child = children.engine(
                model,
                seeds,
                num_tokens,
                max_num_batched_tokens=64,
                block_manager="naive",
                **_settings(server, transport),
            )
            assert child.hear() == {"ready": True}
            num_before = client.stats()["blocks"]
            num_stored = chance.randrange(num_prompts * full_blocks(tokens(0, num_tokens)) // 16)
            child.go_on()
            wait_until(lambda num=num_before + num_stored: client.stats()["blocks"] >= num)  # type: ignore[misc]
            child.send_signal(signal.SIGKILL)
            # The server may still have a request of the dead engine before it reads that the connection has ended.
            wait_until(lambda num=num_connections: client.stats()["connections"] <= num)  # type: ignore[misc]
            wait_until(lambda: held(client) == NOTHING_HELD)
            for prompt_seed in seeds:
                prompt = tokens(prompt_seed, num_tokens)
                num_found = _compare_blocks(client, reference, prompt)
                num_compared += num_found
                num_partial += 0 < num_found < full_blocks(prompt) // 16
        assert num_compared > num_kills, "nothing was stored before the kills"
        assert num_partial > 0, "no prompt was cut off in the middle"
        prompt = tokens(seed * 10_000, num_tokens)
        with open_engine(model, **_settings(server, transport)) as llm:
            [output] = llm.generate(prompt, SHORT, progress=False)
            [right] = reference.generate(prompt, SHORT, progress=False)
            assert output.outputs[0].token_ids == right.outputs[0].token_ids


def _compare_blocks(client: CacheClient, reference: LLM, prompt: list[int]) -> int:
    """The KV that the server has of a prompt is what another engine computes. Returns how many blocks that were."""
    hashes = client.hashes(prompt)
    with client.match(hashes) as lease:
        found = [bytes(view) for view in lease.views()]
        assert lease.ended is not MatchEnd.PENDING, "a dead engine's blocks are still awaited"
    there = client.contains(hashes)
    assert sum(there) == len(found) or not all(there), "blocks behind a gap"
    if not found:
        return 0
    reference.generate(prompt, SHORT, progress=False)
    settled(reference)
    traffic = reference.engine.transfer.traffic
    assert traffic is not None
    host = traffic.hierarchy.guards[0].tier
    assert isinstance(host, HostTier)
    with host.match(hashes[: len(found)]) as lease:
        computed = [bytes(view) for view in lease.views()]
    assert len(computed) == len(found)
    for mine, other in zip(found, computed, strict=True):
        torch.testing.assert_close(_floats(mine), _floats(other), rtol=1e-3, atol=1e-4)
    return len(found)


def _floats(block: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(block), dtype=torch.float32)


# --- two engines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_what_one_engine_computed_is_a_hit_in_another_process(model: Path, children: Nursery, transport: str) -> None:
    with cache_server(tcp=True) as server:
        child = children.engine(model, [1], 500, **_settings(server, transport))
        assert child.hear() == {"ready": True}
        child.go_on()
        computed = child.hear()
        assert sum(computed["cached"].values()) == 0
        assert child.hear()["settled"]

        with open_engine(model, **_settings(server, transport)) as llm:
            [output] = llm.generate(tokens(1, 500), SHORT, progress=False)

        assert cached(output.outputs[0]) == {"server": full_blocks(tokens(1, 500))}
        assert output.outputs[0].token_ids == computed["tokens"]


@contextlib.contextmanager
def _computing(model: Path, children: Nursery, server: ServerProcess) -> Iterator[tuple[Child, LLM]]:
    """A child that computes a long prompt, slowly, and an engine that is ready to ask for the same."""
    child = children.engine(
        model, [1], LONG_TOKENS, max_num_batched_tokens=16, schedule="sync", **_settings(server, "unix")
    )
    with open_engine(model, always_load=False, **_settings(server, "unix")) as llm:
        assert child.hear() == {"ready": True}
        with kvtier.connect(server.unix, timeout_s=CALL_S) as operator:
            child.go_on()
            wait_until(lambda: operator.stats()["reservations"])
        yield child, llm


def test_what_one_engine_is_computing_is_waited_for_by_another_process(model: Path, children: Nursery) -> None:
    """It waits while the other makes progress, and computes next to nothing itself."""
    with cache_server() as server, _computing(model, children, server) as (child, llm):
        [output] = llm.generate(tokens(1, LONG_TOKENS), SHORT, progress=False)
        computed = child.hear()

        assert output.outputs[0].token_ids == computed["tokens"]
        assert sum(computed["cached"].values()) == 0
        assert cached(output.outputs[0]).get("server", 0) > LONG_TOKENS // 2, llm.engine.explain("request-0").sentence()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("num_waiting", [1, 40])
def test_who_waits_for_an_engine_that_dies_or_stops_goes_on_by_itself(
    model: Path, children: Nursery, end: signal.Signals, num_waiting: int
) -> None:
    prompt = tokens(1, LONG_TOKENS)
    asked = [Question(prompt + tokens(seed, 3), SHORT) for seed in range(num_waiting)]
    with open_engine(model, kv_cache_space=400 * BLOCK_BYTES) as plain:
        expected = ask(plain, asked)
    with cache_server() as server, _computing(model, children, server) as (child, llm):
        child.send_signal(end)
        outputs = ask(llm, asked)

        assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in expected]
        if end is signal.SIGSTOP:
            child.send_signal(signal.SIGCONT)
            child.hear()


def test_two_engines_that_take_turns_with_growing_prompts_share_everything(model: Path) -> None:
    """Both in this process, each with its own client: turns of one conversation go to either."""
    with cache_server() as server:
        settings = _settings(server, "unix")
        with open_engine(model, **settings) as one, open_engine(model, **settings) as other:
            prompt = tokens(3, 40)
            num_known = 0
            for turn in range(8):
                llm = (one, other)[turn % 2]
                [output] = llm.generate(prompt, SHORT, progress=False)
                settled(llm)
                counts = cached(output.outputs[0])
                assert sum(counts.values()) == num_known, f"turn {turn}: {counts}"
                assert not turn or counts.get("server", 0) > 0
                num_known = (len(prompt) + 3) // 16 * 16
                prompt = prompt + output.outputs[0].token_ids + tokens(100 + turn, 29)
