"""Engines over an object store: what one has computed is a hit for another, and a store that fails costs no answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.deploy.check.objects import notes_on_objects
from kvtier.stores.objects.config import ObjectsConfig
from kvtier.testing.tiny_models import save_tiny_model
from tests.support.object_store import Fault, ObjectServer, object_server
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

SEGMENT = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3")
    return path


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with object_server() as running:
        yield running


def settings(server: ObjectServer, timeout_s: float = CALL_S, **more: Any) -> dict[str, Any]:
    config = ObjectsConfig(url=server.url, settings=server.settings, segment=SEGMENT, timeout_s=timeout_s)
    return {"objects": config, **more}


def test_a_second_engine_finds_whole_segments_of_what_the_first_has_computed(model: Path, server: ObjectServer) -> None:
    asked = questions()
    expected = cold(model, asked)
    kept = settings(server, max_num_batched_tokens=40)
    with open_engine(model, **kept) as llm:
        assert_same_answers(ask(llm, asked), expected)
        settled(llm)
        assert_nothing_held(llm)
    num_segments = full_blocks(asked[0].prompt) // 16 // SEGMENT
    assert len(server.objects) >= num_segments > 0
    with open_engine(model, **kept) as llm:
        found = ask(llm, asked[:1])
        assert_same_answers(found, expected[:1])
        assert cached_by_tier(found) == {"objects": num_segments * SEGMENT * 16}
        assert_same_answers(ask(llm, asked[1:]), expected[1:])
        assert_nothing_held(llm)


@pytest.mark.parametrize("fault", ["refuse", "fail", "hang", "cut", "lie", "short"])
def test_a_store_that_fails_at_any_moment_costs_no_answer(model: Path, server: ObjectServer, fault: Fault) -> None:
    asked = questions()
    expected = cold(model, asked)
    with open_engine(model, **settings(server)) as llm:
        ask(llm, asked)
        settled(llm)
    assert server.objects
    num_read = server.num_read
    with open_engine(model, **settings(server, timeout_s=0.2)) as llm:
        with Asking(llm, asked) as asking:
            wait_until(lambda: server.num_read > num_read)
            server.fault = fault
            assert_same_answers(asking.result(), expected)
        assert_same_answers(ask(llm, asked), expected)
        server.is_over.set()
        server.fault = None
        assert_same_answers(ask(llm, asked), expected)
        assert_nothing_held(llm)


def test_a_check_says_whether_the_store_can_be_used(server: ObjectServer) -> None:
    config = ObjectsConfig(url=server.url, settings=server.settings)
    assert list(notes_on_objects(config)) == []
    assert not server.objects
    server.fault = "refuse"
    [note] = notes_on_objects(config)
    assert note.startswith("the object store refused")
