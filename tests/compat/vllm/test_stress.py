"""Random requests, few pages, aborts, a small cache that hangs and dies: every answer is that of vLLM alone."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import CacheClient
from kvtier.memory.lease import Lease
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.transfer.copier import Copies
from kvtier.transfer.copiers.host_copier import HostCopier
from tests.compat.vllm.engines import (
    answers_without_cache,
    begin,
    engine,
    model_folder,
    num_held,
    tokens_of,
    wait_until,
    wait_until_stored,
)

_NUM_PAGES = 26
_ANSWER_TOKENS = 60
_SECONDS = 12.0
_NUM_ANSWERS = 30


def _prompts(dice: random.Random) -> list[list[int]]:
    starts = [tokens_of(64 * count, seed=100 + count) for count in range(1, 5)]
    prompts = []
    for number in range(16):
        start = dice.choice(starts)
        rest = tokens_of(dice.randrange(5, 160), seed=1000 + number)
        prompts.append(start[: dice.choice([32, 48, len(start)])] + rest)
    return prompts


@dataclass
class _Traffic:
    """Requests that come, end and are given up at random."""

    llm: LLM
    dice: random.Random
    prompts: Sequence[Sequence[int]]
    live: dict[str, int] = field(default_factory=dict)
    answers: list[tuple[int, list[int]]] = field(default_factory=list)
    num_asked: int = 0
    num_aborted: int = 0

    def turn(self) -> None:
        chance = self.dice.random()
        if chance < 0.3 and len(self.live) < 8:
            self._ask()
        elif chance < 0.32 and self.live:
            name = self.dice.choice(list(self.live))
            del self.live[name]
            self.llm.llm_engine.abort_request([name])
            self.num_aborted += 1
        self.step()

    def finish(self) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()

    def step(self) -> None:
        outputs = self.llm.llm_engine.step()
        if not outputs:
            time.sleep(0.005)  # all wait for the cache: it is not asked thousands of times a second
        for output in outputs:
            if output.finished and output.request_id in self.live:
                self.answers.append((self.live.pop(output.request_id), list(output.outputs[0].token_ids)))

    def _ask(self) -> None:
        which, name = self.dice.randrange(len(self.prompts)), f"r{self.num_asked}"
        begin(self.llm, name, self.prompts[which], max_tokens=_ANSWER_TOKENS)
        self.live[name] = which
        self.num_asked += 1


def _wait_until_all_pages_are_free(llm: LLM) -> None:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler

    def is_free() -> bool:
        llm.llm_engine.step()
        return scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == _NUM_PAGES - 1

    wait_until(is_free, "all pages free")


@contextlib.contextmanager
def _loads_take(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """Loads begin late, by up to `seconds`: much happens to their requests meanwhile."""
    at_once = HostCopier.load

    def late(copier: HostCopier, *arguments: Any, **named: Any) -> Copies:
        time.sleep(random.random() * seconds)
        return at_once(copier, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(HostCopier, "load", late)
        yield


@pytest.mark.parametrize("signals", [(), (signal.SIGSTOP,)], ids=["well", "hangs"])
def test_random_requests_are_answered_as_without_the_plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: tuple[signal.Signals, ...]
) -> None:
    dice = random.Random(len(signals))
    prompts = _prompts(dice)
    expected = answers_without_cache(model_folder(), prompts, max_tokens=_ANSWER_TOKENS)
    few_pages = {"num_gpu_blocks_override": _NUM_PAGES, "max_model_len": 512, "max_num_batched_tokens": 128}
    options = ("--folder", str(tmp_path / "cache"), "--disk", "8MiB")
    with (
        cache_server(*options, folder=tmp_path, memory="3MiB") as server,
        engine(model_folder(), server.unix, settings={"timeout_s": 0.4}, **few_pages) as llm,
        _loads_take(monkeypatch, 0.05),
    ):
        traffic = _Traffic(llm, dice, prompts)
        ends_at = time.monotonic() + _SECONDS
        while time.monotonic() < ends_at or len(traffic.answers) < _NUM_ANSWERS:
            traffic.turn()
            if signals and dice.random() < 0.003:
                _pause(server, traffic, dice.random())
        traffic.finish()
        _wait_until_all_pages_are_free(llm)
        wait_until(lambda: num_held(server.unix) == 0, "everything given back")

    assert traffic.num_aborted > 3
    assert [which for which, tokens in traffic.answers if tokens != expected[which]] == []


def _pause(server: ServerProcess, traffic: _Traffic, seconds: float) -> None:
    """The server hangs meanwhile; requests do not."""
    server.send_signal(signal.SIGSTOP)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        traffic.turn()
    server.send_signal(signal.SIGCONT)


def test_a_preempted_request_given_up_while_it_loads_again_ends_once(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was saved before, and is being loaded when it ends: vLLM must hear of one of the two only."""
    prompt = tokens_of(300)
    few_pages = {"num_gpu_blocks_override": _NUM_PAGES, "max_model_len": 512}
    with engine(model_folder(), server.unix, **few_pages) as llm, _loads_take(monkeypatch, 0.5):
        core = llm.llm_engine.engine_core.engine_core
        begin(llm, "a", prompt, max_tokens=200)
        for _ in range(100):
            wait_until(lambda: bool(llm.llm_engine.step()), "a token")  # none while it is being matched
        wait_until_stored(server.unix, prompt)
        core.reset_prefix_cache(reset_running_requests=True)

        def is_loading() -> bool:
            llm.llm_engine.step()
            return any(request.status.name == "WAITING_FOR_REMOTE_KVS" for request in core.scheduler.requests.values())

        wait_until(is_loading, "a load")
        llm.llm_engine.abort_request(["a"])
        _wait_until_all_pages_are_free(llm)
        wait_until(lambda: num_held(server.unix) == 0, "everything given back")
        assert not core.scheduler.requests


def test_requests_in_a_long_queue_hit_though_not_all_can_be_held_at_once(tmp_path: Path) -> None:
    prompts = [tokens_of(300, seed=number) for number in range(1, 31)]
    options = ("--folder", str(tmp_path / "cache"), "--disk", "64MiB")
    with (
        cache_server(*options, folder=tmp_path, memory="6MiB") as server,
        engine(model_folder(), server.unix, max_num_seqs=2) as llm,
    ):
        for prompt in prompts:
            begin(llm, f"first {prompt[0]} {prompt[1]}", prompt, max_tokens=1)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        for prompt in prompts:
            wait_until_stored(server.unix, prompt)
        wait_until(lambda: bool(llm.llm_engine.step()) or llm.reset_prefix_cache(), "vLLM's prefix cache empty")
        for number, prompt in enumerate(prompts):
            begin(llm, str(number), prompt, max_tokens=1)
        cached = []
        while llm.llm_engine.has_unfinished_requests():
            cached += [output.num_cached_tokens for output in llm.llm_engine.step() if output.finished]

    assert cached == [288] * len(prompts)


def test_requests_that_were_given_up_are_not_matched(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow cache keeps the matching threads busy, but requests that have left delay no others."""
    prompts = [tokens_of(200, seed=number) for number in range(1, 41)]
    answers_again = threading.Event()
    lengths: list[int] = []
    at_once = CacheClient.match_lazily

    def slow(client: CacheClient, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        lengths.append(len(hashes))
        answers_again.wait(10.0)
        return at_once(client, hashes, timeout_s=timeout_s)

    monkeypatch.setattr(CacheClient, "match_lazily", slow)
    with engine(model_folder(), server.unix, settings={"match_timeout_s": 30.0}) as llm:
        for number, prompt in enumerate(prompts):
            begin(llm, str(number), prompt, max_tokens=1)
        llm.llm_engine.abort_request([str(number) for number in range(len(prompts))])
        begin(llm, "last", tokens_of(300), max_tokens=1)
        answers_again.set()
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()

    assert len(lengths) < len(prompts) / 2
    assert lengths[-1] == 299 // 16
