"""The official `anthropic` client's usual programs against a deployment with a real engine.

They need the fixture `serving` of `test_openai_client.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

pytestmark = pytest.mark.slow

_QUESTION: list[Any] = [{"role": "user", "content": "Tell me about the cache in five words."}]
_GREEDY = {"temperature": 0.0}
"""Not every version of the client has a name for it."""


@pytest.fixture
def client(serving: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=serving.openai_url, api_key="none", max_retries=0) as one:
        yield one


def test_a_message_is_answered(client: anthropic.Anthropic, serving: Any) -> None:
    message = client.messages.create(model=serving.model, messages=_QUESTION, max_tokens=8, system="Be brief.")

    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 8


def test_a_greedy_message_streams_what_it_answers_whole(client: anthropic.Anthropic, serving: Any) -> None:
    asked: dict[str, Any] = {"model": serving.model, "messages": _QUESTION, "max_tokens": 12, "extra_body": _GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()

    assert text == whole.content[0].text
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_a_stop_sequence_ends_a_message_and_is_named(client: anthropic.Anthropic, serving: Any) -> None:
    asked: dict[str, Any] = {"model": serving.model, "messages": _QUESTION, "max_tokens": 40, "extra_body": _GREEDY}
    text = client.messages.create(**asked).content[0].text
    stop = text[len(text) // 2 :][:3]
    message = client.messages.create(**asked, stop_sequences=[stop, "no such text"])

    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert stop not in message.content[0].text


def test_the_tokens_of_a_prompt_are_counted(client: anthropic.Anthropic, serving: Any) -> None:
    counted = client.messages.count_tokens(model=serving.model, messages=_QUESTION, system="Be brief.")
    usage = client.messages.create(model=serving.model, messages=_QUESTION, system="Be brief.", max_tokens=1).usage

    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    assert counted.input_tokens == usage.input_tokens + read + written


def test_a_prompt_that_was_asked_before_is_read_from_the_cache(client: anthropic.Anthropic, serving: Any) -> None:
    asked: dict[str, Any] = {"model": serving.model, "max_tokens": 2, "system": "Cached as a whole. " * 20}
    first = client.messages.create(**asked, messages=_QUESTION).usage
    again = client.messages.create(**asked, messages=_QUESTION).usage

    assert first.cache_creation_input_tokens
    assert again.cache_read_input_tokens
    assert again.cache_read_input_tokens >= first.cache_creation_input_tokens - 16


def test_errors_are_the_clients_own(client: anthropic.Anthropic, serving: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(model="gpt-17", messages=_QUESTION, max_tokens=1)
    long: Any = [{"role": "user", "content": "x " * 4 * serving.max_model_len}]
    with pytest.raises(anthropic.BadRequestError, match="tokens"):
        client.messages.create(model=serving.model, messages=long, max_tokens=1)
