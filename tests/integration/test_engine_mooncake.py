"""Engines over a Mooncake pool, a stand-in: what one has computed others find, and what fails costs no answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.testing.tiny_models import save_tiny_model
from tests.support.mooncake import Fault, StandInMaster, stand_in_master
from tests.support.tiered_engines import (
    Asking,
    ask,
    assert_nothing_held,
    assert_same_answers,
    cached_by_tier,
    cold,
    full_blocks,
    open_engine,
    questions,
    settled,
)
from tests.support.waiting import CALL_S, wait_until

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3")
    return path


@pytest.fixture
def master() -> Iterator[StandInMaster]:
    with stand_in_master() as running:
        yield running


def settings(master: StandInMaster, timeout_s: float = CALL_S) -> dict[str, Any]:
    return {"mooncake": master.config(timeout_s=timeout_s)}


def test_a_second_engine_finds_what_the_first_has_computed(model: Path, master: StandInMaster) -> None:
    asked = questions()
    expected = cold(model, asked)
    with open_engine(model, **settings(master)) as llm:
        wait_until(lambda: master.calls["register"] == 1)
        assert_same_answers(ask(llm, asked), expected)
        settled(llm)
        wait_until(lambda: len(master.objects) >= full_blocks(asked[0].prompt) // 16)
        assert_nothing_held(llm)
    with open_engine(model, **settings(master)) as llm:
        wait_until(lambda: master.calls["register"] == 2)
        found = ask(llm, asked[:1])
        assert_same_answers(found, expected[:1])
        assert cached_by_tier(found) == {"mooncake": full_blocks(asked[0].prompt)}
        assert_same_answers(ask(llm, asked[1:]), expected[1:])
        assert_nothing_held(llm)


@pytest.mark.parametrize("fault", ["hang", "fail", "lie", "short", "long", "few", "crash"])
@pytest.mark.sampled(every=7)
def test_a_pool_that_fails_at_any_moment_costs_no_answer(model: Path, master: StandInMaster, fault: Fault) -> None:
    asked = questions()
    expected = cold(model, asked)
    with open_engine(model, **settings(master)) as llm:
        ask(llm, asked)
        settled(llm)
    with open_engine(model, **settings(master, timeout_s=0.2)) as llm:
        with Asking(llm, asked) as asking:
            wait_until(lambda: master.calls["exist"] > 0)
            master.fail(fault)
            assert_same_answers(asking.result(), expected)
        assert_same_answers(ask(llm, asked), expected)
        master.resume.set()
        master.fail(None)
        assert_same_answers(ask(llm, asked), expected)
        assert_nothing_held(llm)
