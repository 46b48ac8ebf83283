"""The usual programs of the official `anthropic` client, over an engine without a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from kvtier.api.config import ApiKey
from kvtier.engine.process.messages import TOO_LONG, ChatMessage, ChatPrompt, Submit
from tests.support.fake_engine import (
    ALIAS,
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
    pieces,
    refusing,
    running,
    said,
    words_then,
)

_KEY = "secret"


@pytest.fixture(scope="module")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path_factory.mktemp("client")) as one:
        yield one


@pytest.fixture(scope="module")
def server(_engine: FakeEngine) -> Iterator[Running]:
    with running("openai", config_of(_engine, keys=(ApiKey(name="us", key=_KEY),))) as one:
        yield one


@pytest.fixture
def engine(_engine: FakeEngine) -> FakeEngine:
    _engine.script = echo
    return _engine


@pytest.fixture
def client(server: Running, engine: FakeEngine) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=_KEY, max_retries=0) as one:
        yield one


def _messages(engine: FakeEngine) -> list[ChatMessage]:
    prompt = engine.last.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def _user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def _cached(submit: Submit) -> Iterator[Step]:
    """A prompt of 40 tokens, of which 16 were cached, in two tiers."""
    yield type(accepted(submit))(submit.number, 40)
    yield from pieces(submit, ["a", "b"], cached={"device": 10, "disk": 6})


def _stopped(submit: Submit) -> Iterator[Step]:
    yield accepted(submit)
    yield said(submit, "one", completion=ending("stop", 1, stop="END"))


def test_a_message(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    message = client.messages.create(
        model=MODEL,
        max_tokens=10,
        system="be brief",
        messages=[{"role": "user", "content": "hello there"}],
        extra_body={"temperature": 0.0, "top_k": 5},  # this client has no names for them
    )

    assert message.content[0].text == "hello there"  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message._request_id == message.id
    assert _messages(engine) == [ChatMessage("system", "be brief"), ChatMessage("user", "hello there")]
    assert (engine.last.params.max_tokens, engine.last.params.top_k) == (10, 5)


def test_an_answer_that_is_cut_says_by_what(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    messages = _user("one two three")
    cut = client.messages.create(model=MODEL, max_tokens=2, messages=messages)
    engine.script = _stopped
    stopped = client.messages.create(model=MODEL, max_tokens=9, messages=messages, stop_sequences=["END", "x"])

    assert cut.stop_reason == "max_tokens"
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert engine.last.params.stop == ("END", "x")


def test_usage_tells_what_was_cached_and_by_which_tier(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.script = _cached
    messages = _user("hi")
    usage = client.messages.create(model=MODEL, max_tokens=9, messages=messages).usage
    with client.messages.stream(model=MODEL, max_tokens=9, messages=messages) as stream:
        streamed = stream.get_final_message().usage
    [first, *_] = client.messages.create(model=MODEL, max_tokens=9, messages=messages, stream=True)

    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (8, 16, 16)
    assert usage.model_extra == {"cache_read_input_tokens_by_tier": {"device": 10, "disk": 6}}
    assert usage.output_tokens == 2
    fields = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
    assert [getattr(streamed, name) for name in fields] == [getattr(usage, name) for name in fields]
    begun = first.message.usage  # type: ignore[union-attr]
    assert [getattr(begun, name) for name in fields[:3]] == [getattr(usage, name) for name in fields[:3]]
    assert begun.model_extra == usage.model_extra


def test_a_stream_has_the_events_of_a_message(client: anthropic.Anthropic) -> None:
    messages = _user("one two")
    events = list(client.messages.create(model=MODEL, max_tokens=9, messages=messages, stream=True))

    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0].message.usage.input_tokens == 2  # type: ignore[union-attr]
    assert events[-2].delta.stop_reason == "end_turn"  # type: ignore[union-attr]


def test_the_clients_own_accumulation_of_a_stream(client: anthropic.Anthropic) -> None:
    messages = _user("one two three")
    with client.messages.stream(model=MODEL, max_tokens=9, messages=messages) as stream:
        assert "".join(stream.text_stream) == "one two three"


def test_the_tokens_of_a_prompt_are_counted(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    count = client.messages.count_tokens(
        model=MODEL, system="be brief", messages=[{"role": "user", "content": "one two three"}]
    )

    assert count.input_tokens == 3
    prompt = engine.tokenizes[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [one.role for one in prompt.messages] == ["system", "user"]


def test_tokens_are_counted_with_the_body_of_the_message_to_come(client: anthropic.Anthropic) -> None:
    more: dict[str, Any] = {
        "max_tokens": 100,
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
    }
    messages = _user("one two three")

    assert client.messages.count_tokens(model=MODEL, messages=messages, extra_body=more).input_tokens == 3
    with pytest.raises(anthropic.BadRequestError, match="made_up"):
        client.messages.count_tokens(model=MODEL, messages=messages, extra_body={"made_up": 1})


_FOR_LONG_PROMPTS: list[dict[str, Any]] = [
    {},
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
    {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100_000}}]},
    {"edits": [{"type": "compact_20260112"}]},
]


@pytest.mark.parametrize("management", _FOR_LONG_PROMPTS, ids=str)
def test_edits_for_long_prompts_are_allowed_and_none_is_applied(
    client: anthropic.Anthropic, management: dict[str, Any]
) -> None:
    messages, more = _user("one two three"), {"context_management": management}
    message = client.messages.create(model=MODEL, max_tokens=9, messages=messages, extra_body=more)
    events = list(client.messages.create(model=MODEL, max_tokens=9, messages=messages, stream=True, extra_body=more))
    count = client.messages.count_tokens(model=MODEL, messages=messages, extra_body=more)

    assert message.model_extra == {"context_management": {"applied_edits": []}}
    assert events[-2].model_extra == {"context_management": {"applied_edits": []}}
    assert count.input_tokens == 3


@pytest.mark.parametrize(
    ("management", "words"),
    [
        ([], "context_management must be an object"),
        ({"edits": ["x"]}, r"context_management.edits\[0\] must be an object"),
        ({"edits": [{"type": "clear_all"}]}, "clear_all.*not supported here"),
        ({"edits": [{"type": "clear_thinking_20251015"}]}, "keep must be all"),
        ({"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]}, "be all"),
        ({"edits": [{"type": "compact_20260112"}] * 17}, "must not be more than 16"),
        ({"other": 1}, "context_management.other"),
    ],
    ids=str,
)
def test_edits_that_would_change_the_prompt_are_refused(
    client: anthropic.Anthropic, management: object, words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words):
        client.messages.create(
            model=MODEL, max_tokens=9, messages=_user("hi"), extra_body={"context_management": management}
        )


def test_a_large_body_is_read_elsewhere(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    text = "word " * 20_000
    messages = _user(text)

    assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens == 20_000
    message = client.messages.create(model=MODEL, max_tokens=1, messages=messages, stop_sequences=["x"])
    assert (message.stop_reason, message.content[0].text) == ("max_tokens", "word")  # type: ignore[union-attr]
    assert _messages(engine) == [ChatMessage("user", text)]


def test_errors_are_those_that_the_client_knows(
    client: anthropic.Anthropic, server: Running, engine: FakeEngine
) -> None:
    messages = _user("hi")
    with pytest.raises(anthropic.NotFoundError, match="available: tiny") as unknown:
        client.messages.create(model="other", max_tokens=9, messages=messages)
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert unknown.value.request_id == unknown.value.body["request_id"]  # type: ignore[index]
    engine.script = refusing(TOO_LONG, "the prompt has 9 tokens too many")
    with pytest.raises(anthropic.BadRequestError, match="9 tokens too many"):
        client.messages.create(model=MODEL, max_tokens=9, messages=messages)
    for options in ({"api_key": "wrong"}, {"api_key": None, "auth_token": "wrong"}):
        with (
            anthropic.Anthropic(base_url=server.url, max_retries=0, **options) as other,  # type: ignore[arg-type]
            pytest.raises(anthropic.AuthenticationError, match="the API key is unknown"),
        ):
            other.messages.create(model=MODEL, max_tokens=9, messages=messages)


def test_a_key_may_come_as_other_clients_send_it(server: Running, engine: FakeEngine) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key=None, auth_token=_KEY, max_retries=0) as client:
        messages = _user("hi")
        assert client.messages.create(model=MODEL, max_tokens=9, messages=messages).stop_reason == "end_turn"


def test_models_are_listed_for_this_client_too(client: anthropic.Anthropic, server: Running) -> None:
    listed = list(client.models.list(limit=1))  # all of them: there is one page
    first = client.models.retrieve(MODEL)

    assert [(one.id, one.display_name, one.type) for one in listed] == [
        (name, name, "model") for name in (MODEL, ALIAS)
    ]
    assert first == listed[0]
    assert int(first.created_at.timestamp()) == int(server.service.started_at)


def test_a_stream_that_breaks_is_an_error(tmp_path: Path) -> None:
    messages = _user("hi")
    with (
        fake_engine(tmp_path, script=words_then(["one", "two"], then=DIE)) as engine,
        running("openai", config_of(engine)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError, match="stopped before the answer was complete"),
        client.messages.stream(model=MODEL, max_tokens=9, messages=messages) as stream,
    ):
        stream.until_done()
