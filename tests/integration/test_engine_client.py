"""The streaming client: any number of threads, aborts at any time, and what happens when the engine ends."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvtier import LLM, SamplingParams
from kvtier.engine.answer import Completion, StreamPiece
from kvtier.engine.client import Admitted, AnswerStream, EngineClient, StreamEvent, Submission
from kvtier.engine.engine import Engine
from kvtier.engine.schedule.step import Step
from kvtier.errors import AnswerFailed, EngineStopped, InvalidParameter, PromptTooLong
from kvtier.testing.servers import cache_server
from kvtier.testing.tiny_models import save_tiny_model
from tests.support.waiting import LIMIT_S, wait_until

torch.set_num_threads(1)

ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
PATIENCE_S = LIMIT_S


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


# --- sinks ------------------------------------------------------------------------------------------------------------


class Collector:
    """A sink that keeps every call, and counts down the answers it waits for."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.calls: list[Sequence[tuple[str, StreamEvent]]] = []
        self.threads: set[str] = set()
        self._num_left = fails_after

    def put(self, news: Sequence[tuple[str, StreamEvent]]) -> None:
        if self._num_left is not None:
            if not self._num_left:
                raise RuntimeError("the connection is on fire")
            self._num_left -= 1
        self.threads.add(threading.current_thread().name)
        self.calls.append(list(news))

    def by_request(self) -> dict[str, list[StreamEvent]]:
        found: dict[str, list[StreamEvent]] = defaultdict(list)
        for call in self.calls:
            for request_id, one in call:
                found[request_id].append(one)
        return found


def wait_for_all(client: EngineClient) -> None:
    wait_until(lambda: client.num_requests == 0)


def test_a_sink_gets_all_that_a_step_brings_in_one_call(client: EngineClient) -> None:
    sink = Collector()
    gate = Collector()
    client.submit([9], ENDLESS, request_id="first", sink=gate)  # keeps the thread busy while the others are submitted
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    handles = [client.submit([1, 2, number], params, request_id=f"r{number}", sink=sink) for number in range(6)]
    wait_until(lambda: client.num_requests == 1)

    assert all(type(handle) is Submission for handle in handles)
    assert sink.threads == {"kvtier-engine"}
    stepping = [call for call in sink.calls if not isinstance(call[0][1], Admitted)]
    assert len(stepping) < 6 * 20, "several requests share a call"
    for call in stepping:
        assert len({request_id for request_id, _ in call}) == len(call), "one token a step"
    for request_id, news in sink.by_request().items():
        admitted, *pieces = news
        assert admitted == Admitted(3)
        assert [piece.completion is not None for piece in pieces] == [False] * 19 + [True], request_id
        tokens = [token_id for piece in pieces for token_id in piece.token_ids]
        assert tokens == pieces[-1].completion.token_ids


def test_two_sinks_get_their_own_only(client: EngineClient) -> None:
    one, other = Collector(), Collector()
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    client.submit([1], params, request_id="mine", sink=one)
    client.submit([1], params, request_id="yours", sink=other)
    wait_for_all(client)

    assert set(one.by_request()) == {"mine"}
    assert set(other.by_request()) == {"yours"}


def test_a_sink_hears_how_long_the_prompt_is_before_its_first_token(client: EngineClient) -> None:
    sink = Collector()
    client.submit("the other one", SamplingParams(max_tokens=2, n=2), request_id="text", sink=sink)
    wait_for_all(client)

    admitted, *pieces = sink.by_request()["text"]
    assert admitted == Admitted(len(client.engine.encode("the other one")))
    assert sum(piece.completion is not None for piece in pieces) == 2


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ([], InvalidParameter),
        ("half \ud800", InvalidParameter),
        ([1] * 20_000, PromptTooLong),
        (None, InvalidParameter),
    ],
    ids=["empty", "no text", "too long", "no prompt"],
)
def test_a_sink_hears_what_is_wrong_with_a_prompt_and_nothing_more(
    client: EngineClient, prompt: object, kind: type[Exception]
) -> None:
    sink = Collector()
    handle = client.submit(prompt, request_id="bad", sink=sink)
    wait_for_all(client)
    handle.abort()
    client.submit([1], SamplingParams(max_tokens=1)).wait()

    [error] = sink.by_request()["bad"]
    assert type(error) is kind
    assert sink.threads == {"kvtier-engine"}


def test_an_abort_reaches_a_sink_as_the_end_of_every_answer(client: EngineClient) -> None:
    sink = Collector()
    params = SamplingParams(n=2, temperature=1.0, max_tokens=None, ignore_eos=True, logprobs=1)
    handle = client.submit([1, 2, 3], params, request_id="one", sink=sink)
    wait_until(lambda: len(sink.calls) > 5)

    handle.abort()
    wait_for_all(client)

    assert len(sink.calls[-1]) == 2
    for _, piece in sink.calls[-1]:
        assert isinstance(piece, StreamPiece)
        assert (piece.token_ids, piece.logprobs) == ([], [])
        assert piece.completion is not None
        assert piece.completion.finish_reason == "abort"


def test_closing_tells_every_sink_once_for_each_request(engine: Engine) -> None:
    sinks = [Collector(), Collector()]
    client = EngineClient(engine)
    for number in range(4):
        client.submit([1, 2], ENDLESS, request_id=str(number), sink=sinks[number % 2])
    wait_until(lambda: all(len(sink.calls) > 3 for sink in sinks))

    client.close()

    for sink in sinks:
        assert all(isinstance(error, EngineStopped) for _, error in sink.calls[-1])
        for news in sink.by_request().values():
            assert [isinstance(one, Exception) for one in news] == [False] * (len(news) - 1) + [True]
    wait_until(lambda: client.num_requests == 0)


@pytest.mark.parametrize("fails_after", [0, 1, 4])
def test_a_sink_that_fails_loses_its_requests_and_nobody_elses(
    engine: Engine, fails_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = Collector(fails_after=fails_after), Collector()
    with EngineClient(engine) as client:
        for number in range(2):
            client.submit([1, 2], ENDLESS, request_id=f"lost-{number}", sink=broken)
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        client.submit([1, 2], params, request_id="kept", sink=whole)
        wait_for_all(client)
        assert_idle(engine)

    assert whole.by_request()["kept"][-1].completion.finish_reason == "length"
    assert "the connection is on fire" in caplog.text


def test_requests_are_counted_from_their_submission_to_their_last_news(client: EngineClient) -> None:
    stream = client.submit([1, 2], ENDLESS)
    assert client.num_requests == 1
    next(iter(stream))
    assert client.num_requests == 1

    stream.abort()
    stream.wait()

    wait_for_all(client)


# --- logprobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["sync", "async-3"])
@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_pieces_carry_the_logprobs_of_their_tokens_and_of_no_others(
    folder: Path, schedule: str, num_logprobs: int
) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=40, logprobs=num_logprobs, stop="e")
    with EngineClient(open_engine(folder, schedule=schedule)) as client:
        pieces, completions = read(client.submit([1, 2, 3], params))

    for index, completion in completions.items():
        own = [piece for piece in pieces if piece.index == index]
        assert [one for piece in own for one in piece.logprobs] == completion.logprobs
        for piece in own:
            assert len(piece.logprobs) == len(piece.token_ids)
            for token_id, logprobs in zip(piece.token_ids, piece.logprobs, strict=True):
                assert token_id in logprobs
                assert num_logprobs <= len(logprobs) <= num_logprobs + 1


def test_who_asks_for_no_logprobs_gets_none(client: EngineClient) -> None:
    pieces, _ = read(client.submit([1, 2, 3], SamplingParams(max_tokens=3)))

    assert [piece.logprobs for piece in pieces] == [None] * len(pieces)


# --- text -------------------------------------------------------------------------------------------------------------


def test_text_is_encoded_by_who_submits_it(engine: Engine) -> None:
    encode, threads = engine.encode, []

    def noting(text: str) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(text)

    engine.encode = noting
    with EngineClient(engine) as client, ThreadPoolExecutor(2, "submitting") as pool:
        params = SamplingParams(temperature=0.0, max_tokens=3)
        answers = [pool.submit(lambda: client.submit("the one", params).wait()[0]) for _ in range(4)]
        texts = {answer.result(PATIENCE_S).text for answer in answers}

    assert len(texts) == 1
    assert {name.partition("_")[0] for name in threads} == {"submitting"}


def test_many_threads_encode_while_answers_are_decoded(engine: Engine) -> None:
    texts = [f"{number} naïve 你好 👩‍👧 " * 50 for number in range(8)]
    expected = [engine.encode(text) for text in texts]
    with EngineClient(engine) as client, ThreadPoolExecutor(8) as pool:
        stream = client.submit([1, 2, 3], ENDLESS)
        found = list(pool.map(client.engine.encode, texts * 20))
        stream.abort()
        stream.wait()

    assert found == expected * 20


# --- settling ---------------------------------------------------------------------------------------------------------


def test_without_tiers_there_is_nothing_to_settle(client: EngineClient) -> None:
    assert client.settle(PATIENCE_S)


def test_settling_waits_for_requests_and_then_for_their_blocks(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with cache_server(tcp=True) as server:
        settings = {"cache_server": server.tcp, "cache_server_token": server.token, "always_load": True}
        with EngineClient(open_engine(folder, **settings)) as client:
            stream = client.submit(list(range(200)), params)
            assert client.settle(PATIENCE_S)
            [first] = stream.wait()
            assert client.settle(PATIENCE_S), "again"
        with EngineClient(open_engine(folder, **settings)) as client:
            [again] = client.submit(list(range(200)) + first.token_ids, params).wait()

    assert again.cached_tokens["server"] == 288


def test_settling_gives_up_in_time_and_the_request_goes_on(client: EngineClient) -> None:
    stream = client.submit([1, 2], ENDLESS)
    next(iter(stream))

    assert not client.settle(0.05)

    stream.abort()
    assert stream.wait()[0].finish_reason == "abort"
    assert client.settle(PATIENCE_S)


def test_a_prompt_that_comes_while_stores_are_waited_for_is_served(folder: Path) -> None:
    engine = open_engine(folder, swap_space=1 << 22)
    assert engine.transfer.traffic is not None
    may_settle = threading.Event()
    engine.transfer.settle = slow_settle(engine.transfer.settle, may_settle)
    with EngineClient(engine) as client, ThreadPoolExecutor(1) as pool:
        settling = pool.submit(client.settle, PATIENCE_S)
        assert client.submit([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)).wait()
        assert not settling.done()
        may_settle.set()
        assert settling.result(PATIENCE_S)


def slow_settle(settle: Callable[[float], bool], may_settle: threading.Event) -> Callable[[float], bool]:
    def slowly(timeout_s: float) -> bool:
        return may_settle.wait(min(timeout_s, 0.01)) and settle(timeout_s)

    return slowly


def test_closing_stores_what_was_computed(folder: Path) -> None:
    with cache_server(tcp=True) as server:
        settings = {"cache_server": server.tcp, "cache_server_token": server.token, "always_load": True}
        client = EngineClient(open_engine(folder, **settings))
        stream = client.submit(list(range(200)), ENDLESS)
        next(iter(stream))
        client.close(settle_s=PATIENCE_S)
        with EngineClient(open_engine(folder, **settings)) as client:
            [again] = client.submit(list(range(200)), SamplingParams(max_tokens=1)).wait()

    assert again.cached_tokens["server"] == 192


def test_after_the_end_nothing_settles(engine: Engine) -> None:
    client = EngineClient(engine)
    client.close()

    assert not client.settle(PATIENCE_S)


def test_a_close_ends_those_who_wait_for_stores(engine: Engine) -> None:
    client = EngineClient(engine)
    stream = client.submit([1, 2], ENDLESS)
    next(iter(stream))
    with ThreadPoolExecutor(1) as pool:
        settling = pool.submit(client.settle, 100 * PATIENCE_S)
        wait_until(lambda: bool(client._settlings))
        client.close()

        assert not settling.result(PATIENCE_S)


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
    """Runs this many steps, and fails every later one."""

    def __init__(self, engine: Engine, num_steps: int) -> None:
        self._runner = engine.runner
        self._num_left = num_steps

    def submit(self, step: Step, constrain: object = None) -> object:
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
        assert "the device is on fire" in str(client.failure)


def test_a_failure_while_a_request_is_taken_in_ends_that_request_alone(engine: Engine) -> None:
    add = engine.add

    def fail_at_one(request_id: str, *arguments: object, **named: object) -> object:
        if request_id == "bad":
            raise RuntimeError("the tokenizer is on fire")
        return add(request_id, *arguments, **named)

    engine.add = fail_at_one
    with EngineClient(engine) as client:
        good = client.submit([1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
        bad = client.submit([1], request_id="bad")

        with pytest.raises(AnswerFailed, match="the tokenizer is on fire"):
            list(bad)
        assert [one.finish_reason for one in good.wait()] == ["length"]
        assert client.submit([3], request_id="later").wait()
        wait_until(lambda: client.num_requests == 0)
