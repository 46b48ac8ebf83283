"""A failure of one request ends that request alone; all others are answered as if it had not been sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import LLM, SamplingParams
from kvtier.engine.answer import AnswerText
from kvtier.engine.building import make_scheduler
from kvtier.engine.client import EngineClient
from kvtier.engine.engine import Engine
from kvtier.engine.schedule.scheduler import Scheduler
from kvtier.engine.schedule.step import Step
from kvtier.errors import EngineStopped
from kvtier.testing.tiny_models import save_tiny_model
from tests.support.waiting import wait_until

_POISON = 77
_GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
_SEEDED = SamplingParams(seed=5, max_tokens=24, ignore_eos=True, presence_penalty=0.5)
_PROMPTS = [[number, *range(1, 20 + 9 * number)] for number in range(1, 6)]
_PARAMS = [_GREEDY, _SEEDED, _GREEDY, _SEEDED, _GREEDY]
_BAD = [_POISON, 1, 2, 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen2", num_layers=1)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with open_llm(model) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(_PROMPTS, _PARAMS, progress=False)]


def open_llm(model: Path, **settings: object) -> LLM:
    return LLM(str(model), kv_cache_space=1 << 20, dtype="float32", **settings)


@pytest.fixture(
    params=[{"schedule": "sync"}, {"schedule": "async-2"}, {"swap_space": 1 << 20, "always_load": True}],
    ids=["sync", "async-2", "with a tier"],
)
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with open_llm(model, **request.param) as llm:
        yield llm.engine


class _Runner:
    """Fails at steps of which `is_bad` says so."""

    def __init__(self, engine: Engine, is_bad: Callable[[Step], bool]) -> None:
        self._runner = engine.runner
        self._is_bad = is_bad

    def submit(self, step: Step, constrain: object = None) -> object:
        if self._is_bad(step):
            raise OverflowError("Python int too large to convert to C long")
        return self._runner.submit(step)

    def forget(self, request: object) -> None:
        self._runner.forget(request)


def _has_poison(step: Step) -> bool:
    return any(row.request.tokens[0] == _POISON for row in step.rows)


def _has_poison_at(num_outputs: int) -> Callable[[Step], bool]:
    return lambda step: any(
        row.request.tokens[0] == _POISON and row.request.num_outputs >= num_outputs for row in step.rows
    )


def _answers(client: EngineClient) -> tuple[list[list[int]], str | None]:
    """The answers to the good prompts, with a bad one among them, and the end of the bad one."""
    streams = [client.submit(prompt, one) for prompt, one in zip(_PROMPTS[:3], _PARAMS[:3], strict=True)]
    bad = client.submit(_BAD, _GREEDY)
    streams += [client.submit(prompt, one) for prompt, one in zip(_PROMPTS[3:], _PARAMS[3:], strict=True)]
    [ended] = bad.wait()
    return [stream.wait()[0].token_ids for stream in streams], ended.finish_reason


@pytest.mark.parametrize("is_bad", [_has_poison, _has_poison_at(5)], ids=["at once", "later"])
def test_a_request_at_which_a_step_fails_ends_alone(
    engine: Engine, expected: list[list[int]], is_bad: Callable[[Step], bool]
) -> None:
    engine.runner = _Runner(engine, is_bad)
    with EngineClient(engine) as client:
        for _ in range(3):
            assert _answers(client) == (expected, "error")
        assert client.failure is None
        wait_until(lambda: client.num_requests == 0)


def test_a_request_that_cannot_be_scheduled_ends_alone(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_faulty_scheduler(*arguments: Any) -> Scheduler:
        scheduler = make_scheduler(*arguments)
        grow = scheduler.blocks.grow

        def fail_at_poison(request: object, *arguments: object, **named: object) -> bool:
            if request.tokens[0] == _POISON:
                raise KeyError("no such block")
            return grow(request, *arguments, **named)

        scheduler.blocks.grow = fail_at_poison
        return scheduler

    monkeypatch.setattr("kvtier.engine.engine.make_scheduler", make_faulty_scheduler)
    engine.scheduler = make_faulty_scheduler(engine.config, engine.parts, engine.transfer)
    with EngineClient(engine) as client:
        assert _answers(client) == (expected, "error")
        assert client.failure is None


def test_a_request_whose_text_cannot_be_made_ends_alone(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    push = AnswerText.push
    texts: list[AnswerText] = []

    def fail_at_poison(text: AnswerText, token_id: int) -> bool:
        if any(engine._texts[one] is text and one.tokens[0] == _POISON for one in engine._texts):
            texts.append(text)
            raise UnicodeError("half a character")
        return push(text, token_id)

    monkeypatch.setattr(AnswerText, "push", fail_at_poison)
    with EngineClient(engine) as client:
        assert _answers(client) == (expected, "error")
        assert client.failure is None
    assert len(texts) == 1


def test_requests_that_fail_only_together_lose_one_of_them(engine: Engine) -> None:
    engine.runner = _Runner(engine, lambda step: len(step.rows) > 2)
    with EngineClient(engine) as client:
        streams = [client.submit(prompt, _GREEDY) for prompt in _PROMPTS]

        reasons = [stream.wait()[0].finish_reason for stream in streams]

        assert client.failure is None
    assert set(reasons) == {"length", "error"}
    assert reasons.count("length") >= 2


def test_a_device_that_computes_nothing_ends_the_engine(engine: Engine) -> None:
    engine.runner = _Runner(engine, lambda step: True)
    with EngineClient(engine) as client:
        streams = [client.submit(prompt, _GREEDY) for prompt in _PROMPTS]

        for stream in streams:
            with pytest.raises(EngineStopped, match="the engine has stopped"):
                stream.wait()


def test_blocks_of_a_failed_request_come_back(engine: Engine) -> None:
    engine.runner = _Runner(engine, _has_poison_at(3))
    with EngineClient(engine) as client:
        _answers(client)
        assert client.settle(60)
    assert engine.scheduler.blocks.num_free_blocks == engine.scheduler.blocks.num_blocks
