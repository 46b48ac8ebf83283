"""The streaming client: any number of threads, aborts at any time, and what happens when the engine ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvtier import LLM, SamplingParams
from kvtier.engine.answer import Completion
from kvtier.engine.client import AnswerStream, EngineClient, StreamPiece
from kvtier.engine.engine import Engine
from kvtier.engine.step import Step
from kvtier.errors import EngineStopped
from kvtier.testing.tiny_models import save_tiny_model

torch.set_num_threads(1)

ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
PATIENCE_S = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3", num_layers=1, max_position_embeddings=16_384)
    return path


@pytest.fixture
def engine(folder: Path) -> Engine:
    return open_engine(folder)


def open_engine(folder: Path, **settings: object) -> Engine:
    return LLM(str(folder), device="cpu", dtype="float32", kv_cache_space=1 << 23, **settings).engine


@pytest.fixture
def client(engine: Engine) -> Iterator[EngineClient]:
    with EngineClient(engine) as client:
        yield client


def read(stream: AnswerStream) -> tuple[list[StreamPiece], dict[int, Completion]]:
    pieces = list(stream)
    return pieces, {piece.index: piece.completion for piece in pieces if piece.completion is not None}


def prompt_of(number: int) -> list[int]:
    return [(number * 7 + place) % 250 for place in range(1 + number % 40)]


def assert_idle(engine: Engine) -> None:
    blocks = engine.scheduler.blocks
    assert not engine.scheduler.has_requests
    assert blocks.num_free_blocks == blocks.num_blocks
    assert engine._requests == {}
    assert engine._texts == {}


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["sync", "async-2"])
def test_many_threads_stream_at_once_and_their_pieces_make_the_answers(folder: Path, schedule: str) -> None:
    num_threads = 24
    engine = open_engine(folder, schedule=schedule, max_num_requests=8)
    expected = [
        LLM.generate(llm_over(engine), prompt_of(number), params_of(number), progress=False)[0].outputs
        for number in range(num_threads)
    ]
    barrier = threading.Barrier(num_threads)

    def stream(number: int) -> tuple[list[StreamPiece], dict[int, Completion]]:
        barrier.wait(PATIENCE_S)
        return read(client.submit(prompt_of(number), params_of(number)))

    with EngineClient(engine) as client, ThreadPoolExecutor(num_threads) as threads:
        results = list(threads.map(stream, range(num_threads), timeout=PATIENCE_S))

    for (pieces, completions), answers in zip(results, expected, strict=True):
        for answer in answers:
            own = [piece for piece in pieces if piece.index == answer.index]
            assert [token_id for piece in own for token_id in piece.token_ids] == answer.token_ids
            assert "".join(piece.text for piece in own) == completions[answer.index].text == answer.text
            assert completions[answer.index].token_ids == answer.token_ids
            assert completions[answer.index].finish_reason == answer.finish_reason
            assert [piece.completion for piece in own[:-1]] == [None] * (len(own) - 1)
    assert_idle(engine)


def llm_over(engine: Engine) -> LLM:
    llm = LLM.__new__(LLM)
    llm._lock = threading.Lock()
    llm.engine = engine
    llm._numbers = iter(range(10**6))
    return llm


def params_of(number: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        seed=number,
        n=1 + number % 3,
        max_tokens=3 + number % 30,
        stop=(chr(97 + number % 26), "ab") if number % 4 == 0 else (),
    )


def test_tokens_arrive_one_by_one(client: EngineClient) -> None:
    pieces, _ = read(client.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)))

    assert [len(piece.token_ids) for piece in pieces] == [1] * 9


@pytest.mark.parametrize("num_answers", [2, 5])
def test_answers_that_end_together_all_arrive(client: EngineClient, num_answers: int) -> None:
    params = SamplingParams(n=num_answers, temperature=1.0, seed=1, max_tokens=5, ignore_eos=True)

    answers = client.submit([1, 2, 3], params).wait()

    assert [answer.index for answer in answers] == list(range(num_answers))
    assert [len(answer.token_ids) for answer in answers] == [5] * num_answers


def test_requests_are_served_one_after_another_by_one_client(client: EngineClient) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)

    answers = [client.submit([1, 2, 3], params).wait()[0].token_ids for _ in range(3)]

    assert answers == [answers[0]] * 3


# --- aborts -----------------------------------------------------------------------------------------------------------


def test_an_abort_from_another_thread_ends_the_stream_with_what_there_is(engine: Engine) -> None:
    with EngineClient(engine) as client:
        stream = client.submit([1, 2, 3], ENDLESS)
        pieces = [next(iter(stream)) for _ in range(5)]
        aborting = threading.Thread(target=stream.abort)
        aborting.start()
        rest = list(stream)
        aborting.join(PATIENCE_S)

    completion = rest[-1].completion
    assert completion is not None
    assert completion.finish_reason == "abort"
    assert completion.token_ids == [token_id for piece in pieces + rest for token_id in piece.token_ids]
    assert completion.text == "".join(piece.text for piece in pieces + rest)
    assert_idle(engine)


def test_an_abort_ends_all_answers_of_its_prompt(engine: Engine) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=None, ignore_eos=True)
    with EngineClient(engine) as client:
        stream = client.submit([1, 2, 3], params)
        next(iter(stream))
        stream.abort()

        answers = stream.wait()
        after = client.submit([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True)).wait()

    assert [answer.finish_reason for answer in answers] == ["abort"] * 3
    assert len(after[0].token_ids) == 2
    assert_idle(engine)


def test_an_abort_leaves_the_other_streams_alone(client: EngineClient) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    [expected] = client.submit([1, 2, 3], params).wait()
    stream, other = client.submit([1, 2, 3], ENDLESS), client.submit([1, 2, 3], params)
    next(iter(stream))

    stream.abort()

    assert other.wait()[0].token_ids == expected.token_ids
    assert stream.wait()[0].finish_reason == "abort"


def test_an_abort_of_what_is_over_does_nothing(client: EngineClient) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    stream = client.submit([1, 2, 3], params)
    [answer] = stream.wait()

    stream.abort()

    assert client.submit([1, 2, 3], params).wait()[0].token_ids == answer.token_ids
    assert list(stream) == []


def test_an_abort_of_an_unknown_request_does_nothing(engine: Engine) -> None:
    assert engine.abort("never seen") == []


def test_aborting_everything_at_random_leaves_an_idle_engine(engine: Engine) -> None:
    def stream(number: int) -> str | None:
        stream = client.submit(prompt_of(number), params_of(number))
        for count, _ in enumerate(stream):
            if count == number % 5:
                stream.abort()
        return None

    with EngineClient(engine) as client, ThreadPoolExecutor(8) as threads:
        list(threads.map(stream, range(40), timeout=PATIENCE_S))

    assert_idle(engine)


# --- the end of the engine --------------------------------------------------------------------------------------------


def test_closing_ends_streams_that_are_being_read(engine: Engine) -> None:
    client = EngineClient(engine)
    stream = client.submit([1, 2, 3], ENDLESS)
    next(iter(stream))

    client.close()

    with pytest.raises(EngineStopped, match="closed"):
        list(stream)


def test_a_closed_client_refuses_and_closes_again(engine: Engine) -> None:
    client = EngineClient(engine)
    client.close()

    with pytest.raises(EngineStopped, match="closed"):
        client.submit([1, 2, 3])
    client.close()


def test_closing_while_threads_submit_leaves_no_stream_without_an_end(engine: Engine) -> None:
    client = EngineClient(engine)
    num_begun = threading.Semaphore(0)

    def submit_until_refused(number: int) -> bool:
        while True:
            try:
                stream = client.submit(prompt_of(number), SamplingParams(max_tokens=2))
                num_begun.release()
                list(stream)
            except EngineStopped:
                return True

    with ThreadPoolExecutor(6) as threads:
        ended = [threads.submit(submit_until_refused, number) for number in range(6)]
        for _ in range(12):
            assert num_begun.acquire(timeout=PATIENCE_S)
        client.close()

        assert all(one.result(PATIENCE_S) for one in ended)


class FailingRunner:
    """Runs so many steps, and then fails each."""

    def __init__(self, engine: Engine, num_steps: int) -> None:
        self._runner = engine.runner
        self._num_left = num_steps

    def submit(self, step: Step) -> object:
        if not self._num_left:
            raise RuntimeError("the device is on fire")
        self._num_left -= 1
        return self._runner.submit(step)

    def forget(self, request: object) -> None:
        self._runner.forget(request)


@pytest.mark.parametrize("num_steps", [0, 7])
def test_a_failure_ends_every_stream_and_refuses_what_comes_later(engine: Engine, num_steps: int) -> None:
    engine.runner = FailingRunner(engine, num_steps)
    with EngineClient(engine) as client:
        streams = [client.submit([1, 2, number], ENDLESS, request_id=str(number)) for number in range(3)]

        for stream in streams:
            with pytest.raises(EngineStopped, match="the device is on fire"):
                list(stream)
        with pytest.raises(EngineStopped, match="the device is on fire"):
            client.submit([1])


def test_a_failure_while_a_request_is_taken_in_ends_its_stream_too(engine: Engine) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("the tokenizer is on fire")

    engine.add = fail
    with EngineClient(engine) as client:
        stream = client.submit([1])

        with pytest.raises(EngineStopped, match="the tokenizer is on fire"):
            list(stream)
