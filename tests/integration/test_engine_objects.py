"""Engines over an object store: what one has computed is a hit for another, and a store that fails costs no answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import LLM, SamplingParams
from kvtier.deploy.check.objects import notes_on_objects
from kvtier.engine.answer import RequestOutput
from kvtier.stores.objects.config import ObjectsConfig
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.tiers.objects import ObjectTier
from tests.support.object_store import Fault, ObjectServer, object_server
from tests.support.tiered_engines import (
    BLOCK_BYTES,
    Asking,
    Question,
    ask,
    assert_nothing_held,
    assert_same_answers,
    cached_by_tier,
    cold,
    failures,
    full_blocks,
    open_engine,
    questions,
    settled,
    tokens,
)
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

torch.set_num_threads(1)

SEGMENT = 2

_SHORT = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3")
    return path


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with object_server() as running:
        yield running


def settings(server: ObjectServer, timeout_s: float = CALL_S, segment: int = SEGMENT, **more: Any) -> dict[str, Any]:
    config = ObjectsConfig(url=server.url, settings=server.settings, segment=segment, timeout_s=timeout_s)
    return {"objects": config, **more}


def documents(count: int) -> list[Question]:
    """Behind one system prompt of six whole blocks, which ends within its second segment of four."""
    beginning = tokens(5, 100)
    return [Question(beginning + tokens(50 + number, 101), _SHORT) for number in range(count)]


def written(llm: LLM) -> ObjectTier:
    """All that was offered is written, or lost."""
    settled(llm)
    traffic = llm.engine.transfer.traffic
    assert traffic is not None
    tier = traffic.hierarchy.segmented
    assert isinstance(tier, ObjectTier)
    assert tier.flush(LIMIT_S)
    return tier


def forget(llm: LLM) -> None:
    """Evict everything from host memory, as others' blocks would."""
    traffic = llm.engine.transfer.traffic
    assert traffic is not None
    assert traffic.hierarchy.host is not None
    traffic.hierarchy.host.drop()


def assert_each_is_found(
    model: Path, kept: dict[str, Any], asked: list[Question], expected: list[RequestOutput]
) -> None:
    """By an engine that has nothing of each but what the object store has, from its first token on."""
    with open_engine(model, **kept, block_manager="disable_prefix_caching") as llm:
        for one, answer in zip(asked, expected, strict=True):
            found = ask(llm, [one])
            assert_same_answers(found, [answer])
            assert cached_by_tier(found) == {"objects": full_blocks(one.prompt)}
            settled(llm)
            forget(llm)
        assert_nothing_held(llm)


def refused(llm: LLM) -> float:
    traffic = llm.engine.transfer.traffic
    assert traffic is not None
    metrics = traffic.hierarchy.metrics
    return metrics.value(metrics.refused_blocks, tier="objects")


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


@pytest.mark.parametrize("is_at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("chunk", [40, 1000])
def test_every_document_behind_one_system_prompt_is_found_by_another_engine(
    model: Path, server: ObjectServer, chunk: int, is_at_once: bool
) -> None:
    asked = documents(3)
    expected = cold(model, asked)
    kept = settings(server, segment=4, max_num_batched_tokens=chunk)
    with open_engine(model, **kept) as llm:
        for some in [asked] if is_at_once else [[one] for one in asked]:
            ask(llm, some)
        written(llm)
        assert_nothing_held(llm)
    assert len(server.objects) == 1 + 2 * len(asked), "the beginning once, and two segments of each document"
    assert_each_is_found(model, kept, asked, expected)


def test_documents_are_found_though_only_the_device_has_kept_their_system_prompt(
    model: Path, server: ObjectServer
) -> None:
    asked = documents(3)
    expected = cold(model, asked)
    kept = settings(server, segment=4)
    with open_engine(model, **kept) as llm:
        for one in asked:
            ask(llm, [one])
            written(llm)
            forget(llm)
        assert refused(llm) == 0
        assert_nothing_held(llm)
    assert len(server.objects) == 1 + 2 * len(asked)
    assert_each_is_found(model, kept, asked, expected)


def test_segments_that_host_memory_cannot_hold_are_refused_and_cost_nothing_else(
    model: Path, server: ObjectServer
) -> None:
    """Host memory of nine blocks: a segment fits, and leaves before it is pushed when others follow at once."""
    asked = documents(6)
    expected = cold(model, asked)
    kept = settings(server, segment=4, swap_space=9 * BLOCK_BYTES)
    with open_engine(model, **kept) as llm:
        assert_same_answers(ask(llm, asked), expected)
        assert_same_answers(ask(llm, asked), expected)
        written(llm)
        assert refused(llm) > 0
        assert_nothing_held(llm)
    with open_engine(model, **kept) as llm:
        assert_same_answers(ask(llm, asked), expected)
        assert_nothing_held(llm)


def test_a_system_prompt_that_was_lost_is_offered_again_though_it_is_a_hit(model: Path, server: ObjectServer) -> None:
    asked = documents(2)
    expected = cold(model, asked)
    kept = settings(server, segment=4)
    with open_engine(model, **kept) as llm:
        tier = written(llm)
        num_uploads, tier._blocks._max_uploads = tier._blocks._max_uploads, 0
        ask(llm, asked[:1])
        written(llm)
        assert not server.objects
        assert failures(llm, tier="objects", kind="busy") > 0
        tier._blocks._max_uploads = num_uploads
        tier._blocks._clock = lambda: time.monotonic() + 60
        ask(llm, asked)
        written(llm)
        assert_nothing_held(llm)
    assert len(server.objects) == 1 + 2 * len(asked)
    assert_each_is_found(model, kept, asked, expected)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("fault", ["hang", "refuse", "fail", "lie", "cut", "short"])
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
