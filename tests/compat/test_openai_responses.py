"""The official `openai` client's programs with responses, against a deployment with a real engine.

They need the fixture `serving` of `test_openai_client.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.slow  # a deployment, with engines

_QUESTION = "Tell me about the cache in five words."


@pytest.fixture
def client(serving: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.openai_url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_a_response_is_answered(client: openai.OpenAI, serving: Any) -> None:
    response = client.responses.create(
        model=serving.model, input=_QUESTION, instructions="Be brief.", max_output_tokens=8
    )

    assert response.status in ("completed", "incomplete")
    assert response.usage is not None
    assert 0 < response.usage.output_tokens <= 8


def test_a_greedy_response_streams_what_it_answers_whole(client: openai.OpenAI, serving: Any) -> None:
    asked: dict[str, Any] = {"model": serving.model, "input": _QUESTION, "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")

    assert text == whole.output_text


def test_a_conversation_goes_on_in_both_ways_alike(client: openai.OpenAI, serving: Any) -> None:
    asked: dict[str, Any] = {"model": serving.model, "max_output_tokens": 8, "temperature": 0}
    first = client.responses.create(**asked, input=_QUESTION)
    kept = client.responses.create(**asked, input="And more?", previous_response_id=first.id)
    history = [{"role": "user", "content": _QUESTION}, *first.output, {"role": "user", "content": "And more?"}]
    sent = client.responses.create(**asked, input=history, store=False)  # type: ignore[call-overload]

    assert sent.output_text == kept.output_text
    assert sent.usage.input_tokens == kept.usage.input_tokens
    assert client.responses.retrieve(kept.id).previous_response_id == first.id


def test_logprobs_of_the_text_are_counted_by_its_tokens(client: openai.OpenAI, serving: Any) -> None:
    response = client.responses.create(
        model=serving.model,
        input=_QUESTION,
        max_output_tokens=4,
        top_logprobs=3,
        include=["message.output_text.logprobs"],
    )

    [part] = response.output[0].content  # type: ignore[union-attr]
    assert response.usage is not None
    assert len(part.logprobs) == response.usage.output_tokens  # type: ignore[union-attr, arg-type]
    assert all(len(one.top_logprobs) == 3 for one in part.logprobs)  # type: ignore[union-attr]


def test_tools_that_the_template_does_not_know_are_refused(client: openai.OpenAI, serving: Any) -> None:
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    with pytest.raises(openai.BadRequestError, match="tools are not supported"):
        client.responses.create(model=serving.model, input=_QUESTION, tools=[tool])


def test_a_prompt_that_is_too_long_is_refused(client: openai.OpenAI, serving: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=serving.model, input="x " * 4 * serving.max_model_len, truncation="auto")
    assert caught.value.code == "context_length_exceeded"
