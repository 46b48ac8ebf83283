"""Hits in vLLM's own prefix cache do not wait for the cache server, which is asked only now and then."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm import LLM

import kvtier
from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import CacheClient
from kvtier.memory.lease import Lease
from kvtier.testing.servers import ServerProcess
from tests.compat.vllm.engines import (
    ask_one,
    engine,
    layout_of,
    model_folder,
    namespaces_at,
    num_held,
    num_stored_tokens,
    tokens_of,
    wait_until,
    wait_until_stored,
)

_PROMPT = tokens_of(300)


@dataclass
class Asked:
    """The answers to the scheduler, and the number of blocks that the server was asked for each time."""

    answers: list[tuple[int | None, bool]] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)


@contextmanager
def _watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    asked = Asked()
    connector: Any = llm.llm_engine.engine_core.engine_core.scheduler.connector
    answer, match = connector.get_num_new_matched_tokens, CacheClient.match_lazily

    def answered(*arguments: Any) -> tuple[int | None, bool]:
        asked.answers.append(answer(*arguments))
        return asked.answers[-1]

    def matched(client: CacheClient, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        asked.num_blocks.append(len(hashes))
        return match(client, hashes, timeout_s=timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(connector, "get_num_new_matched_tokens", answered)
        patch.setattr(CacheClient, "match_lazily", matched)
        yield asked


def test_what_vllm_has_itself_is_answered_at_once_and_not_asked_for(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model_folder(), server.unix) as llm:
        cold = ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
        with _watched(llm, monkeypatch) as asked:
            warm = ask_one(llm, _PROMPT)

    assert warm.tokens == cold.tokens
    assert warm.num_cached >= 288
    assert asked.answers == [(0, False)]
    assert asked.num_blocks == []


def test_a_hung_server_keeps_nobody_waiting_for_what_vllm_has_itself(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.transfer.known_prefixes._FRESH_S", 0.0)
    with engine(model_folder(), server.unix) as llm:
        cold = ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
        server.send_signal(signal.SIGSTOP)
        with _watched(llm, monkeypatch) as asked:
            warm = ask_one(llm, _PROMPT)
        server.send_signal(signal.SIGCONT)

    assert warm.tokens == cold.tokens
    assert asked.answers == [(0, False)]


def test_only_what_vllm_lacks_is_asked_for(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = [*_PROMPT[:256], *tokens_of(200, seed=2)]
    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, longer)
        wait_until_stored(server.unix, longer)
    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
        with _watched(llm, monkeypatch) as asked:
            answer = ask_one(llm, longer)

    assert asked.num_blocks == [(456 - 1) // 16 - 256 // 16]
    assert answer.num_cached >= 448


@pytest.mark.parametrize("is_fresh", [True, False])
def test_what_the_server_has_lost_is_saved_again_though_vllm_has_it(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, is_fresh: bool
) -> None:
    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
        (known,) = namespaces_at(server.unix)
        with kvtier.connect(server.unix, layout=layout_of(known), namespace=known.namespace) as client:
            wait_until(lambda: num_held(server.unix) == 0, "nothing held")
            client.drop()
        assert num_stored_tokens(server.unix, _PROMPT) == 0
        if not is_fresh:
            monkeypatch.setattr("kvtier.transfer.known_prefixes._FRESH_S", 0.0)

        again = ask_one(llm, _PROMPT, max_tokens=64)

        assert again.num_cached >= 288
        if not is_fresh:
            wait_until_stored(server.unix, _PROMPT)
    assert num_stored_tokens(server.unix, _PROMPT) == (0 if is_fresh else 288)
