"""vLLM with the plug-in answers as without it, and computes a prefix once: over resets, engines and restarts."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm

from kvtier.plugins.vllm.releases import release_of
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.transfer.copier import Copies
from kvtier.transfer.copiers.host_copier import HostCopier
from tests.compat.vllm.engines import (
    answers_without_cache,
    ask,
    ask_one,
    begin,
    counter,
    drive,
    engine,
    forget_prefixes,
    model_folder,
    num_stored_tokens,
    tokens_of,
    wait_until_stored,
)
from tests.support.waiting import LIMIT_S

_PROMPT = tokens_of(300)


def _whole_pages(num_tokens: int, page_tokens: int) -> int:
    """The tokens of a prompt that can be hits: whole pages, and never the last token."""
    return (num_tokens - 1) // page_tokens * page_tokens


@pytest.mark.parametrize("page_tokens", [32, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_answers_are_those_without_the_plug_in_and_after_a_reset_the_prefix_comes_from_the_server(
    server: ServerProcess, family: str, dtype: str, page_tokens: int
) -> None:
    model = model_folder(family)
    (expected,) = answers_without_cache(model, [_PROMPT], dtype=dtype, page_tokens=page_tokens)

    with engine(model, server.unix, dtype=dtype, page_tokens=page_tokens) as llm:
        cold = ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT, dtype=dtype, count=_whole_pages(300, page_tokens))
        forget_prefixes(llm)
        warm = ask_one(llm, _PROMPT)

    assert (cold.tokens, cold.num_cached) == (expected, 0)
    assert warm.tokens == expected
    assert _whole_pages(300, page_tokens) <= warm.num_cached < 300


def test_a_prompt_longer_than_half_of_the_servers_memory_is_loaded_from_there_and_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may lease half of it. With "fail", a block that is promised and not loaded fails the request."""
    monkeypatch.setattr("kvtier.transfer.storer._BATCH_BLOCKS", 8)  # a batch of stores is a reservation, too
    prompts = [tokens_of(900, seed=seed) for seed in range(1, 5)]
    expected = answers_without_cache(model_folder(), prompts)
    options = ("--folder", str(tmp_path / "cache"), "--disk", "64MiB")
    with (
        cache_server(*options, folder=tmp_path, memory="3MiB") as server,
        engine(model_folder(), server.unix, failure_policy="fail", max_num_batched_tokens=128) as llm,
    ):
        for prompt in prompts:
            ask_one(llm, prompt)
            wait_until_stored(server.unix, prompt)
        forget_prefixes(llm)
        from_disk = [ask_one(llm, prompt) for prompt in prompts]
        forget_prefixes(llm)
        from_memory = ask_one(llm, prompts[-1])
        forget_prefixes(llm)
        together = ask(llm, prompts)

    assert [answer.tokens for answer in from_disk] == [answer.tokens for answer in together] == expected
    assert from_memory.tokens == expected[-1]
    assert [answer.num_cached for answer in (*from_disk, from_memory, *together)] == [896] * 9


def test_of_a_prompt_longer_than_a_memory_without_disk_the_beginning_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end would evict it, and nothing would be found again. A client may lease half of the memory for a hit."""
    monkeypatch.setattr("kvtier.transfer.storer._BATCH_BLOCKS", 4)
    prompt = tokens_of(900)
    (expected,) = answers_without_cache(model_folder(), [prompt])
    with cache_server(memory="1MiB") as server, engine(model_folder(), server.unix, max_num_batched_tokens=64) as llm:
        for _ in range(2):
            cold = ask_one(llm, prompt)
            wait_until_stored(server.unix, prompt, count=448)
            forget_prefixes(llm)
        warm = ask_one(llm, prompt)

    assert cold.tokens == warm.tokens == expected
    assert warm.num_cached == 256


@pytest.mark.parametrize("page_tokens", [32, 128])
def test_a_prompt_of_full_pages_is_loaded_whole_and_goes_on_as_without_the_plug_in(
    server: ServerProcess, page_tokens: int
) -> None:
    prompt = tokens_of(256)
    longer = prompt + tokens_of(40, seed=2)
    expected = answers_without_cache(model_folder(), [prompt, longer], page_tokens=page_tokens)

    settings = {"whole_prompts": True}
    with engine(model_folder(), server.unix, page_tokens=page_tokens, settings=settings) as llm:
        ask_one(llm, prompt)
        wait_until_stored(server.unix, prompt, count=256)
        forget_prefixes(llm)
        loaded, own, continued = ask_one(llm, prompt), ask_one(llm, prompt), ask_one(llm, longer)

    assert (loaded.tokens, loaded.num_cached) == (expected[0], 256)
    assert (own.tokens, own.num_cached) == (expected[0], 256 - page_tokens)
    assert (continued.tokens, continued.num_cached) == (expected[1], 256)


class _LateCopies:
    """Copies that are made when work on the device is ordered after them."""

    def __init__(self, copy: Callable[[], Copies]) -> None:
        self._copy = copy
        self._made = threading.Event()
        self.preceded: list[int] = []

    @property
    def is_done(self) -> bool:
        return self._made.is_set()

    @property
    def num_bytes_left(self) -> int:
        return 0 if self.is_done else 1

    def wait(self) -> None:
        assert self._made.wait(LIMIT_S), "no step was ordered after these copies"

    def precede(self, layer: int) -> None:
        self.preceded.append(layer)
        if not self.is_done:
            self._copy()
            self._made.set()


def _connector_of(llm: vllm.LLM) -> Any:
    """The scheduler's side of the plug-in."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def _copy_late(monkeypatch: pytest.MonkeyPatch) -> list[_LateCopies]:
    """The copies of loads from now on but the first, with which a load on an idle device is reported.

    Work on a device would run later than it is queued; here, a load is made only when something is ordered after it.
    """
    load = HostCopier.load
    num_calls = itertools.count()
    begun: list[_LateCopies] = []

    def load_late(copier: HostCopier, *arguments: Any, **named: Any) -> Copies:
        if not next(num_calls):
            return load(copier, *arguments, **named)
        begun.append(_LateCopies(functools.partial(load, copier, *arguments, **named)))
        return begun[-1]

    monkeypatch.setattr(HostCopier, "load", load_late)
    return begun


def test_a_step_uses_a_load_whose_last_blocks_arrive_beside_it_layer_by_layer(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = answers_without_cache(model_folder(), [_PROMPT])
    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
        forget_prefixes(llm)
        begun = _copy_late(monkeypatch)
        answer = ask_one(llm, _PROMPT)

    assert (answer.tokens, answer.num_cached) == (expected, _whole_pages(300, 32))
    num_layers = len(set(begun[0].preceded))
    assert num_layers > 1
    assert begun[0].preceded == list(range(num_layers))


def test_a_request_in_the_pages_of_an_aborted_load_writes_into_them_after_its_last_bytes(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tokens_of(300, seed=40)
    (expected,) = answers_without_cache(model_folder(), [other])
    with engine(model_folder(), server.unix, num_gpu_blocks_override=14, max_model_len=400) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
        forget_prefixes(llm)
        begun = _copy_late(monkeypatch)
        begin(llm, "aborted", _PROMPT)
        begin(llm, "other", other)  # it waits for pages
        waiting = _connector_of(llm)._scheduler._waiting  # loads that the scheduler knows of
        while waiting or not begun:
            llm.llm_engine.step()
            assert not begun or not begun[0].preceded
        llm.llm_engine.abort_request(["aborted"])
        answers = drive(llm)

    assert answers.tokens["other"] == expected
    assert len(set(begun[0].preceded)) == 1


def test_a_new_engine_on_the_same_server_hits(server: ServerProcess) -> None:
    with engine(model_folder(), server.unix) as llm:
        cold = ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)

    with engine(model_folder(), server.unix) as llm:
        warm = ask_one(llm, _PROMPT)

    assert warm.tokens == cold.tokens
    assert warm.num_cached >= _whole_pages(300, 32)


def test_what_an_engine_stored_with_one_size_of_pages_is_a_hit_with_another(server: ServerProcess) -> None:
    with engine(model_folder(), server.unix, page_tokens=128) as llm:
        cold = ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT, count=256)

    with engine(model_folder(), server.unix, page_tokens=32) as llm:
        warm = ask_one(llm, _PROMPT)

    assert warm.tokens == cold.tokens
    assert warm.num_cached >= 256


def test_an_engine_that_ends_right_after_its_answer_has_stored_the_prompt(server: ServerProcess) -> None:
    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, _PROMPT)

    assert num_stored_tokens(server.unix, _PROMPT) >= _whole_pages(300, 32)


def test_after_a_restart_of_the_server_the_prefix_comes_from_disk(tmp_path: Path) -> None:
    options = ("--folder", str(tmp_path / "cache"), "--disk", "64MiB")
    with cache_server(*options, folder=tmp_path) as server, engine(model_folder(), server.unix) as llm:
        cold = ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)

    with cache_server(*options, folder=tmp_path) as server, engine(model_folder(), server.unix) as llm:
        warm = ask_one(llm, _PROMPT)

    assert warm.tokens == cold.tokens
    assert warm.num_cached >= _whole_pages(300, 32)


def test_prompts_that_share_prefixes_and_come_together_are_answered_as_without_the_plug_in(
    server: ServerProcess,
) -> None:
    shared = tokens_of(160)
    prompts = [shared + tokens_of(50 + 20 * number, seed=10 + number) for number in range(5)]
    prompts += [shared, tokens_of(200, seed=30)]
    expected = answers_without_cache(model_folder(), prompts)

    with engine(model_folder(), server.unix) as llm:
        cold = ask(llm, prompts)
        for prompt in prompts:
            wait_until_stored(server.unix, prompt, count=_whole_pages(len(prompt), 32))
        forget_prefixes(llm)
        warm = ask(llm, prompts)

    assert [answer.tokens for answer in cold] == expected
    assert [answer.tokens for answer in warm] == expected
    assert all(answer.num_cached >= _whole_pages(len(prompt), 32) for answer, prompt in zip(warm, prompts, strict=True))


def test_a_longer_prompt_hits_what_it_shares_with_a_shorter_one(server: ServerProcess) -> None:
    longer = _PROMPT[:160] + tokens_of(200, seed=5)
    (expected,) = answers_without_cache(model_folder(), [longer])

    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
        forget_prefixes(llm)
        answer = ask_one(llm, longer)

    assert answer.tokens == expected
    assert answer.num_cached == 160


def test_what_vllm_still_holds_itself_is_continued_from_the_server(server: ServerProcess) -> None:
    """The first pages are vLLM's own hit, the next ones come from the server."""
    (expected,) = answers_without_cache(model_folder(), [_PROMPT])
    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)

    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, _PROMPT[:100], max_tokens=1)
        answer = ask_one(llm, _PROMPT)

    assert answer.tokens == expected
    assert answer.num_cached >= _whole_pages(300, 32)


def test_a_conversation_hits_the_answers_too(server: ServerProcess) -> None:
    with engine(model_folder(), server.unix) as llm:
        first = ask_one(llm, _PROMPT, max_tokens=100)
        next_prompt = _PROMPT + first.tokens + tokens_of(20, seed=9)
        wait_until_stored(server.unix, next_prompt, count=384)
        forget_prefixes(llm)
        second = ask_one(llm, next_prompt)
    (expected,) = answers_without_cache(model_folder(), [next_prompt])

    assert second.tokens == expected
    assert second.num_cached >= 384


def test_with_store_prompt_the_answers_are_not_stored(server: ServerProcess) -> None:
    with engine(model_folder(), server.unix, settings={"store": "prompt"}) as llm:
        answer = ask_one(llm, _PROMPT, max_tokens=100)
        wait_until_stored(server.unix, _PROMPT)

    assert _whole_pages(300, 32) <= num_stored_tokens(server.unix, _PROMPT + answer.tokens) <= 300


def test_a_prompt_shorter_than_a_page_is_answered_and_misses(server: ServerProcess) -> None:
    prompts = [tokens_of(count, seed=count) for count in (1, 15, 31)]
    expected = answers_without_cache(model_folder(), prompts, max_tokens=4)

    with engine(model_folder(), server.unix) as llm:
        ask(llm, prompts, max_tokens=4)
        forget_prefixes(llm)
        answers = ask(llm, prompts, max_tokens=4)

    assert [answer.tokens for answer in answers] == expected


def test_a_prompt_of_whole_pages_leaves_vllm_something_to_compute(server: ServerProcess) -> None:
    prompt = tokens_of(256)
    (expected,) = answers_without_cache(model_folder(), [prompt])

    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, prompt)
        wait_until_stored(server.unix, prompt)
        forget_prefixes(llm)
        answer = ask_one(llm, prompt)

    assert answer.tokens == expected
    assert 224 <= answer.num_cached < 256


def test_hits_are_counted_by_vllms_own_metrics(server: ServerProcess) -> None:
    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
        assert counter(llm, "vllm:external_prefix_cache_hits") == 0
        forget_prefixes(llm)
        answer = ask_one(llm, _PROMPT)

        assert counter(llm, "vllm:external_prefix_cache_hits") == answer.num_cached


def test_chunked_prefill_stores_and_loads_the_same(server: ServerProcess) -> None:
    prompt = tokens_of(700)
    chunks = {"max_num_batched_tokens": 96, "enable_chunked_prefill": True}
    (expected,) = answers_without_cache(model_folder(), [prompt])

    with engine(model_folder(), server.unix, **chunks) as llm:
        cold = ask_one(llm, prompt)
        wait_until_stored(server.unix, prompt)
        forget_prefixes(llm)
        warm = ask_one(llm, prompt)

    assert cold.tokens == warm.tokens == expected
    assert warm.num_cached >= _whole_pages(700, 32)


def test_without_vllms_own_prefix_cache_prefixes_still_come_from_the_server(server: ServerProcess) -> None:
    with engine(model_folder(), server.unix, enable_prefix_caching=False) as llm:
        cold = ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
        warm = ask_one(llm, _PROMPT)

    assert warm.tokens == cold.tokens
    assert warm.num_cached >= _whole_pages(300, 32)


def test_a_server_over_tcp_serves_as_well(tmp_path: Path) -> None:
    with cache_server(folder=tmp_path, tcp=True) as server:
        address = "tcp://" + server.tcp.removeprefix("tcp:").removeprefix("//")
        settings = {"token_file": str(tmp_path / "token")}
        with engine(model_folder(), address, settings=settings) as llm:
            cold = ask_one(llm, _PROMPT)
            wait_until_stored(server.unix, _PROMPT)
            forget_prefixes(llm)
            warm = ask_one(llm, _PROMPT)

    assert warm.tokens == cold.tokens
    assert warm.num_cached >= _whole_pages(300, 32)


@pytest.mark.skipif(
    release_of(vllm.__version__) < (0, 31), reason="such an engine of vLLM 0.30 leaves descriptors behind when it ends"
)
def test_an_engine_in_processes_of_its_own_hits_what_another_stored(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model_folder(), server.unix) as llm:
        cold = ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    with engine(model_folder(), server.unix) as llm:
        warm = ask_one(llm, _PROMPT)

    assert warm.tokens == cold.tokens
    assert warm.num_cached >= _whole_pages(300, 32)
