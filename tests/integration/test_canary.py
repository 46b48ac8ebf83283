"""The canary finds every wrong block that it samples, whatever is wrong with it, and no sound one ever."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvtier import LLM, SamplingParams
from kvtier.api.engine_connection import EngineConnection, ProbeTimes
from kvtier.api.engines import Engines, ServedModel
from kvtier.cli.main import main
from kvtier.engine.client import EngineClient
from kvtier.engine.config import EngineConfig
from kvtier.engine.process.hello import hello_of
from kvtier.engine.process.server import EngineServer
from kvtier.errors import ConfigError
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.testing.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model
from tests.support.planting import (
    Alter,
    check_all,
    checks_of,
    compute,
    open_checked,
    plant,
    read_block,
    vandal,
    write_block,
)
from tests.support.tiered_engines import settled
from tests.support.waiting import wait_until

torch.set_num_threads(1)

NUM_TOKENS = 180


def prompt_of(seed: int, count: int = NUM_TOKENS) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB_SIZE) for _ in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen3", num_layers=3)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with cache_server(memory="64MiB") as process:
        yield process


def _one_layer(block: torch.Tensor) -> torch.Tensor:
    block[1] = -block[1]
    return block


def _one_head_of_values(block: torch.Tensor) -> torch.Tensor:
    half = block.shape[-1] // 2
    block[-1, 0, :, half:] = block[-1, 1, :, half:]
    return block


def _two_tokens_changed_places(block: torch.Tensor) -> torch.Tensor:
    return block[:, :, [1, 0, *range(2, block.shape[2])]]


def _one_token_in_one_layer(block: torch.Tensor) -> torch.Tensor:
    block[2, :, 5] = block[2, :, 9]
    return block


def _shifted_tokens(block: torch.Tensor) -> torch.Tensor:
    return block.roll(1, dims=2)


def _not_a_number(block: torch.Tensor) -> torch.Tensor:
    block[0, 0, 0, 0] = torch.nan
    return block


def _zeros(block: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(block)


WAYS: list[Alter] = [
    _one_layer,
    _one_head_of_values,
    _two_tokens_changed_places,
    _one_token_in_one_layer,
    _shifted_tokens,
    _not_a_number,
    _zeros,
]


@pytest.mark.parametrize(
    ("dtype", "ways", "num_tokens"),
    [
        ("float32", WAYS, NUM_TOKENS),
        ("bfloat16", WAYS[2:4], 36),
        pytest.param("bfloat16", WAYS, NUM_TOKENS, marks=pytest.mark.slow),
        pytest.param("float16", WAYS, NUM_TOKENS, marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_wrong_block_is_found(
    model: Path, server: ServerProcess, dtype: str, ways: list[Alter], num_tokens: int
) -> None:
    find_all(model, server, dtype, ways, num_tokens)


def find_all(
    model: Path, server: ServerProcess, dtype: str, ways: list[Alter], num_tokens: int, **more: object
) -> None:
    """A prompt for each way, one block of which is altered: each is found, and by one check alone."""
    prompts = [prompt_of(seed, num_tokens) for seed in range(len(ways))]
    settings = {"dtype": dtype, "salt": f"ways {num_tokens}", **more}
    with open_checked(model, server.unix, **settings) as producer:
        compute(producer, prompts)
        for number, (prompt, alter) in enumerate(zip(prompts, ways, strict=True)):
            plant(producer, server.unix, prompt, number % (num_tokens // 16), alter)
    with open_checked(model, server.unix, **settings) as llm:
        for prompt, alter in zip(prompts, ways, strict=True):
            assert compute(llm, [prompt]) > 0
            before = checks_of(llm).get("wrong", 0)
            assert check_all(llm).get("wrong", 0) == before + 1, f"{alter.__name__} was not found"
            assert "wrong KV" in llm.engine.loading.off_because
            llm.engine.loading.resume()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_block_of_another_prefix_with_the_same_tokens_is_found(
    model: Path, server: ServerProcess, dtype: str
) -> None:
    """Also if it is the last block: those before it are right, and so are its own tokens and positions."""
    own = prompt_of(1)
    others = [*prompt_of(2, 150), *own[150:]]
    settings = {"dtype": dtype, "salt": "prefixes"}
    with open_checked(model, server.unix, **settings) as producer:
        compute(producer, [own, others])
        with vandal(producer, server.unix) as client:
            wrong = read_block(producer, client, client.hashes(others)[10])
            write_block(client, client.hashes(own)[10], wrong)
    with open_checked(model, server.unix, **settings) as llm:
        assert compute(llm, [own]) > 160
        assert check_all(llm) == {"wrong": 1}


def test_loading_is_off_until_it_is_resumed_and_nothing_that_was_loaded_is_used_again(
    model: Path, server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, other = prompt_of(3), prompt_of(4)
    settings = {"dtype": "float32", "salt": "off"}
    with open_checked(model, server.unix, **settings) as producer:
        compute(producer, [prompt, other])
        right = producer.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8), progress=False)
        plant(producer, server.unix, prompt, 0, _zeros)
    with open_checked(model, server.unix, **settings) as llm:
        assert compute(llm, [prompt]) > 0
        with caplog.at_level(logging.ERROR, "kvtier"):
            check_all(llm)
        assert len([one for one in caplog.messages if one.startswith("canary:")]) == 1

        assert compute(llm, [other]) == 0
        again = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8), progress=False)
        assert again[0].outputs[0].token_ids == right[0].outputs[0].token_ids
        assert not any(again[0].outputs[0].cached_tokens.values())
        assert "canary" in llm.explain(again[0].request_id).sentence()
        assert not llm.engine.has_idle_work
        blocks = llm.engine.scheduler.blocks
        settled(llm)
        llm.engine.step()
        assert blocks.num_free_blocks == blocks.num_blocks

        llm.engine.loading.resume()
        assert not llm.engine.loading.off_because
    with open_checked(model, server.unix, **settings) as llm:  # as after a restart
        assert compute(llm, [other]) > 0


def test_a_request_ends_a_check_at_once_which_begins_anew(model: Path, server: ServerProcess) -> None:
    settings = {"dtype": "float32", "salt": "interrupted"}
    with open_checked(model, server.unix, **settings) as producer:
        compute(producer, [prompt_of(5)])
    with open_checked(model, server.unix, **settings) as llm:
        assert compute(llm, [prompt_of(5)]) > 0
        engine = llm.engine
        while not engine.is_checking:
            engine.idle_step()
        engine.idle_step()
        blocks = engine.scheduler.blocks
        assert blocks.num_free_blocks < blocks.num_blocks
        engine.add("meanwhile", prompt_of(6), SamplingParams(max_tokens=1))
        assert not engine.is_checking
        assert not engine.has_idle_work
        engine.abort("meanwhile")
        engine.forget("meanwhile")
        assert blocks.num_free_blocks == blocks.num_blocks
        assert check_all(llm) == {"sound": 1}


def test_blocks_that_the_device_has_lost_are_not_checked(model: Path, server: ServerProcess) -> None:
    settings = {"dtype": "float32", "salt": "lost", "kv_cache_space": 26 * 12288}
    with open_checked(model, server.unix, **settings) as producer:
        compute(producer, [prompt_of(7)])
    with open_checked(model, server.unix, **settings) as llm:
        assert compute(llm, [prompt_of(7)]) > 0
        compute(llm, [prompt_of(8, 380)])
        assert check_all(llm) == {"gone": 1}
        assert not llm.engine.loading.off_because


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_only_the_share_that_is_set_is_checked(model: Path, server: ServerProcess, share: float) -> None:
    settings = {"dtype": "float32", "salt": "share"}
    with open_checked(model, server.unix, canary_share=share, **settings) as llm:
        compute(llm, [prompt_of(9)])
        prompts = [prompt_of(9)[:-1]] * 40
        for prompt in prompts:
            llm.engine._rewind([])  # what was loaded before is not on the device any more
            assert compute(llm, [prompt]) > 0
            check_all(llm)
        num_checked = sum(checks_of(llm).values())
        assert num_checked == 0 if share == 0 else 5 <= num_checked <= 35


def test_a_serving_engine_checks_by_itself_once_it_is_idle(model: Path, server: ServerProcess) -> None:
    settings = {"dtype": "float32", "salt": "serving"}
    with open_checked(model, server.unix, **settings) as producer:
        compute(producer, [prompt_of(10), prompt_of(11)])
        plant(producer, server.unix, prompt_of(11), 3, _two_tokens_changed_places)
    llm = open_checked(model, server.unix, **settings)
    with EngineClient(llm.engine) as client:
        client.submit(prompt_of(10), SamplingParams(max_tokens=1)).wait()
        wait_until(lambda: checks_of(llm) == {"sound": 1})
        client.submit(prompt_of(11), SamplingParams(max_tokens=1)).wait()
        wait_until(lambda: bool(llm.engine.loading.off_because))
        assert checks_of(llm) == {"sound": 1, "wrong": 1}
        client.resume_loading()
        assert not llm.engine.loading.off_because


def check_sound(
    model: Path, server: ServerProcess, dtype: str, chunks: tuple[int, int], batch: int, seed: int, **more: object
) -> int:
    """Checks of blocks that an engine computed otherwise than the one that checks them. None may find anything."""
    settings = {"dtype": dtype, "salt": f"sound {seed}", **more}
    prompts = [prompt_of(1000 * seed + number, 60 + 37 * number % 240) for number in range(12)]
    with open_checked(model, server.unix, max_num_batched_tokens=chunks[0], **settings) as producer:
        long_answers = SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True)
        for start in range(0, len(prompts), batch):
            outputs = producer.generate(prompts[start : start + batch], long_answers, progress=False)
            for place, output in enumerate(outputs):  # blocks that decoding has filled are checked, too
                prompts[start + place] += output.outputs[0].token_ids[:-1]
        compute(producer, prompts)
    with open_checked(model, server.unix, max_num_batched_tokens=chunks[1], **settings) as llm:
        for prompt in prompts:
            assert compute(llm, [prompt]) > 0
            assert check_all(llm).keys() == {"sound"}
        return _num_blocks(llm, prompts)


def _num_blocks(llm: LLM, prompts: list[list[int]]) -> int:
    block_tokens = llm.engine.arena.layout.block_tokens
    return sum(len(prompt) // block_tokens for prompt in prompts)


@pytest.mark.parametrize(
    ("dtype", "chunks", "batch"),
    [("float32", (8192, 31), 3), pytest.param("bfloat16", (24, 8192), 6, marks=pytest.mark.slow)],
)
def test_sound_blocks_are_never_found_wrong(
    model: Path, server: ServerProcess, dtype: str, chunks: tuple[int, int], batch: int
) -> None:
    assert check_sound(model, server, dtype, chunks, batch, seed=1) > 100


@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "family", "dtype"),
    [(number, *case) for number, case in enumerate(itertools.product(FAMILIES, ("float32", "bfloat16", "float16")))],
)
def test_thousands_of_sound_blocks_are_never_found_wrong(tmp_path: Path, number: int, family: str, dtype: str) -> None:
    """Each time with a server of its own, since one that others have filled declines new blocks.

    The device has room for the checks of the deepest model: of a small one, a check takes too large a share.
    """
    chance = random.Random(number)
    save_tiny_model(tmp_path, family, num_layers=chance.choice((2, 6, 16)), seed=number)
    num_blocks = 0
    for _ in range(3):
        chunks = (chance.choice((17, 64, 8192)), chance.choice((16, 100, 8192)))
        with cache_server(memory="64MiB") as server:
            batch, seed = chance.choice((1, 4, 12)), chance.randrange(10**6)
            num_blocks += check_sound(tmp_path, server, dtype, chunks, batch, seed, kv_cache_space=64 << 20)
    assert num_blocks > 300


def test_an_admin_sees_what_was_found_and_resumes_loading(model: Path, server: ServerProcess, tmp_path: Path) -> None:
    settings = {"dtype": "float32", "salt": "command"}
    with open_checked(model, server.unix, **settings) as producer:
        compute(producer, [prompt_of(12)])
        plant(producer, server.unix, prompt_of(12), 1, _one_layer)
    engine = open_checked(model, server.unix, **settings).engine
    address = f"unix:{tmp_path / 'e.sock'}"
    hello = hello_of(engine, name="engine-0", model="tiny", started_at=1.0)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(EngineClient(engine))
        registries = [engine.metrics.registry]
        serving = EngineServer(client, engine.prompts, hello, str(tmp_path / "e.sock"), registries)
        stack.callback(serving.close)
        before = CliRunner().invoke(main, ["canary", "--engine", address])
        assert (before.exit_code, before.output) == (0, f"{address}: loading is on; checks: none\n")

        client.submit(prompt_of(12), SamplingParams(max_tokens=1)).wait()
        wait_until(lambda: bool(engine.loading.off_because))
        found = CliRunner().invoke(main, ["canary", "--engine", address])
        assert found.exit_code == 1
        assert "loading is off: the canary found wrong KV" in found.output
        assert found.output.endswith("checks: 1 wrong\n")

        resumed = CliRunner().invoke(main, ["canary", "--engine", address, "--resume"])
        assert (resumed.exit_code, resumed.output) == (0, f"{address}: loading is on; checks: 1 wrong\n")
    away = CliRunner().invoke(main, ["canary", "--engine", address])
    assert away.exit_code == 1
    assert "no engine answers" in away.output


def test_engines_of_a_deployment_that_share_a_namespace_stop_together(
    model: Path, server: ServerProcess, tmp_path: Path
) -> None:
    prompt = prompt_of(13)
    with open_checked(model, server.unix, dtype="float32", salt="together") as producer:
        compute(producer, [prompt])
        plant(producer, server.unix, prompt, 1, _one_layer)
    with contextlib.ExitStack() as stack:
        clients, connections = [], []
        for number, salt in enumerate(("together", "together", "apart")):
            engine = open_checked(model, server.unix, dtype="float32", salt=salt).engine
            clients.append(stack.enter_context(EngineClient(engine)))
            name, path = f"engine-{number}", str(tmp_path / f"{number}.sock")
            hello = hello_of(engine, name=name, model="tiny", started_at=1.0)
            serving = EngineServer(clients[-1], engine.prompts, hello, path, [engine.metrics.registry])
            stack.callback(serving.close)
            connections.append(EngineConnection(name, path, ProbeTimes(ask_every_s=0.05)))
        asyncio.run(_stop_together(clients, Engines([ServedModel(["tiny"], connections)]), prompt))


async def _stop_together(clients: list[EngineClient], engines: Engines, prompt: list[int]) -> None:
    finder, other, apart = clients
    engines.start()
    try:
        await asyncio.to_thread(wait_until, lambda: engines.is_ready)
        assert await _num_cached(finder, prompt)
        await asyncio.to_thread(
            wait_until, lambda: all(connection.loading_off for connection in engines.connections[:2])
        )
        assert other.loading_off.startswith("the engine engine-0 says that the canary found wrong KV")
        assert (finder.was_told, other.was_told) == (False, True)
        assert not await _num_cached(other, prompt)

        for client in (other, finder):
            await asyncio.to_thread(client.resume_loading)
        await asyncio.to_thread(
            wait_until, lambda: not any(connection.loading_off for connection in engines.connections)
        )
        assert not other.was_told
        assert await _num_cached(other, prompt)
        assert not apart.loading_off
    finally:
        await engines.close()


async def _num_cached(client: EngineClient, prompt: list[int]) -> int:
    """Tokens of an answer to `prompt` that did not have to be computed."""
    submission = client.submit(prompt, SamplingParams(max_tokens=1))
    return sum((await asyncio.to_thread(submission.wait))[0].cached_tokens.values())


@pytest.mark.parametrize("share", [-0.1, 1.5, "all", True, float("nan")])
def test_a_share_that_is_none_is_refused(share: object) -> None:
    with pytest.raises(ConfigError, match="canary_share must be from 0 to 1"):
        EngineConfig(model="m", canary_share=share)  # type: ignore[arg-type]
