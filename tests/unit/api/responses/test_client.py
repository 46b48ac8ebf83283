"""The usual programs of the official `openai` client with responses, over an engine without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent

from kvtier.api.config import ApiKey
from kvtier.engine.grammar import DEAD_END
from kvtier.engine.process.messages import ChatMessage, ChatPrompt, Submit
from tests.support.fake_engine import (
    DIE,
    MODEL,
    FakeEngine,
    Running,
    Step,
    accepted,
    config_of,
    echo,
    ending,
    fake_engine,
    running,
    said,
    words_then,
)

_KEY, _OTHER = "secret", "another"
_KEYS = (ApiKey(name="us", key=_KEY), ApiKey(name="them", key=_OTHER))


@pytest.fixture(scope="module")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path_factory.mktemp("client")) as one:
        yield one


@pytest.fixture(scope="module")
def server(_engine: FakeEngine) -> Iterator[Running]:
    with running("openai", config_of(_engine, keys=_KEYS)) as one:
        yield one


@pytest.fixture
def engine(_engine: FakeEngine) -> FakeEngine:
    _engine.script = echo
    return _engine


@pytest.fixture
def client(server: Running, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=_KEY, max_retries=0) as one:
        yield one


def _messages(engine: FakeEngine) -> list[ChatMessage]:
    prompt = engine.last.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def test_a_response(client: openai.OpenAI, engine: FakeEngine) -> None:
    response = client.responses.create(
        model=MODEL, input="hello there", instructions="be brief", temperature=0, max_output_tokens=10, store=False
    )

    assert response.output_text == "hello there"
    assert response.status == "completed"
    assert response.id.startswith("resp_")
    assert response._request_id == response.id
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 0
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert response.usage.total_tokens == 4
    assert (response.instructions, response.temperature, response.max_output_tokens) == ("be brief", 0.0, 10)
    assert _messages(engine) == [ChatMessage("system", "be brief"), ChatMessage("user", "hello there")]


def test_programs_that_measure_ask_for_answers_of_full_length(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.responses.create(model=MODEL, input="hello", max_output_tokens=8, extra_body={"ignore_eos": True})

    assert engine.last.params.ignore_eos


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="one two three", max_output_tokens=2)

    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"  # type: ignore[union-attr]
    assert response.output_text == "one two"


def test_a_stream_has_numbered_events_from_its_beginning_to_its_end(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="one two", stream=True))

    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == "one two"  # type: ignore[union-attr]
    assert events[0].response.id == events[-1].response.id  # type: ignore[union-attr]


def test_the_clients_own_accumulation_of_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="one two three") as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()

    assert response.output_text == "one two three"
    assert response.usage is not None
    assert response.usage.output_tokens == 3


def test_logprobs_come_with_the_text(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="one two", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    streamed = list(client.responses.create(model=MODEL, input="one two", top_logprobs=2, stream=True))

    [part] = response.output[0].content  # type: ignore[union-attr]
    assert [one.token for one in part.logprobs] == ["one", " two"]  # type: ignore[union-attr]
    assert [len(one.top_logprobs) for one in part.logprobs] == [2, 2]  # type: ignore[union-attr]
    deltas = [event for event in streamed if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == ["one", " two"]


def _read_all(stream: Iterable[ResponseStreamEvent], seen: list[Any]) -> None:
    for event in stream:
        seen.append(event)


def test_a_stream_that_breaks_has_failed(tmp_path: Path) -> None:
    seen: list[Any] = []
    with (
        fake_engine(tmp_path, script=words_then(["one", "two"], then=DIE)) as engine,
        running("openai", config_of(engine)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIError, match="stopped before the answer was complete"),
    ):
        _read_all(client.responses.create(model=MODEL, input="hi", stream=True), seen)

    assert seen[-1].type == "response.failed"
    assert seen[-1].response.error.code == "server_error"


def test_an_answer_that_its_grammar_does_not_let_continue_is_an_error_of_the_request(tmp_path: Path) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield said(submit, "one", completion=ending("dead_end", 1))

    seen: list[Any] = []
    with (
        fake_engine(tmp_path, script=script) as engine,
        running("openai", config_of(engine)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match=DEAD_END):
            client.responses.create(model=MODEL, input="hi")
        with pytest.raises(openai.APIError, match=DEAD_END) as caught:
            _read_all(client.responses.create(model=MODEL, input="hi", stream=True), seen)

    assert seen[-1].type == "response.failed"
    assert seen[-1].response.error.code == "invalid_prompt"
    assert caught.value.type == "invalid_request_error"
    assert seen[-1].response.status == "failed"


def test_a_conversation_goes_on_with_the_items_that_came(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = client.responses.create(model=MODEL, input="hello", store=False)

    client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": "hello"}, *first.output, {"role": "user", "content": "more"}],  # type: ignore[list-item]
    )

    assert _messages(engine) == [
        ChatMessage("user", "hello"),
        ChatMessage("assistant", "hello"),
        ChatMessage("user", "more"),
    ]


def test_a_conversation_goes_on_from_a_response_that_is_kept(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = client.responses.create(model=MODEL, input="hello", instructions="be brief")
    second = client.responses.create(model=MODEL, input="more", previous_response_id=first.id)
    client.responses.create(model=MODEL, input="still more", previous_response_id=second.id, instructions="be long")

    assert [(one.role, one.content) for one in _messages(engine)] == [
        ("system", "be long"),
        ("user", "hello"),
        ("assistant", "hello"),
        ("user", "more"),
        ("assistant", "more"),
        ("user", "still more"),
    ]


def test_items_of_a_response_that_is_kept_are_referred_to(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = client.responses.create(model=MODEL, input="hello")
    client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": "hello"},
            {"type": "item_reference", "id": first.output[0].id or ""},
            {"role": "user", "content": "more"},
        ],
    )

    assert [(one.role, one.content) for one in _messages(engine)] == [
        ("user", "hello"),
        ("assistant", "hello"),
        ("user", "more"),
    ]


def test_a_response_is_found_listed_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=[{"role": "user", "content": text} for text in "abc"])  # type: ignore[misc]

    assert client.responses.retrieve(made.id).output_text == made.output_text
    items = client.responses.input_items.list(made.id, order="asc", limit=2)
    assert [item.content[0].text for item in items] == ["a", "b", "c"]  # type: ignore[union-attr]
    newest = client.responses.input_items.list(made.id).data
    assert [item.content[0].text for item in newest] == ["c", "b", "a"]  # type: ignore[union-attr]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="unknown or no longer kept"):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="unknown or no longer kept"):
        client.responses.create(model=MODEL, input="more", previous_response_id=made.id)


def test_nobody_finds_what_is_not_stored_or_anothers(client: openai.OpenAI, server: Running) -> None:
    unstored = client.responses.create(model=MODEL, input="a", store=False)
    stored = client.responses.create(model=MODEL, input="a")

    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=_OTHER, max_retries=0) as other:
        for ask in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                ask(stored.id)  # type: ignore[operator]
        with pytest.raises(openai.BadRequestError):
            other.responses.create(model=MODEL, input="b", previous_response_id=stored.id)
        reference = {"type": "item_reference", "id": stored.output[0].id}
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model=MODEL, input=[reference])  # type: ignore[list-item]
    assert client.responses.retrieve(stored.id).id == stored.id


def test_a_large_input_is_read_elsewhere_and_continued(client: openai.OpenAI, engine: FakeEngine) -> None:
    text = "word " * 20_000
    first = client.responses.create(model=MODEL, input="hello", instructions="be brief")
    second = client.responses.create(
        model=MODEL, input=text, previous_response_id=first.id, instructions="be long", max_output_tokens=1
    )
    client.responses.create(model=MODEL, input="end", previous_response_id=second.id)

    assert [(one.role, one.content) for one in _messages(engine)] == [
        ("user", "hello"),
        ("assistant", "hello"),
        ("user", text),
        ("assistant", "word"),
        ("user", "end"),
    ]


def test_the_asynchronous_client(server: Running, engine: FakeEngine) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=_KEY, max_retries=0) as client:
            response = await client.responses.create(model=MODEL, input="one two")
            return response.output_text

    assert asyncio.run(ask()) == "one two"
