"""OpenAI's own client: chats, tools, forms of answers, completions and Responses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.compat.http.conftest import Stand
from tests.compat.http.weather import CHAT_TOOL, QUESTION, RESPONSES_TOOL, SYSTEM, TOOL, Asked, Forecast, forecast

_QUESTION: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


@pytest.fixture
def client(stand: Stand) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stand.v1, api_key="none", max_retries=0) as one:
        yield one


def test_every_model_is_listed(client: openai.OpenAI) -> None:
    assert {"qwen", "llama", "mistral"} <= {one.id for one in client.models.list()}
    assert client.models.retrieve("llama").id == "llama"


# --- chats ------------------------------------------------------------------------------------------------------------


def test_a_chat_streams_what_it_answers_whole(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": _QUESTION, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)

    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == (whole.choices[0].message.content or "")
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_call_that_is_required_comes_and_its_result_is_taken(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=_QUESTION, tools=[CHAT_TOOL], tool_choice="required", parallel_tool_calls=False
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    asked = Asked.model_validate_json(call.function.arguments)

    result = {"role": "tool", "tool_call_id": call.id, "content": forecast(asked.place, asked.days)}
    messages = [*_QUESTION, choice.message.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(
        model=model, messages=messages, tools=[CHAT_TOOL], tool_choice="none", max_tokens=8
    )

    assert call.function.name == TOOL
    assert last.choices[0].finish_reason in ("stop", "length")
    assert last.usage.prompt_tokens > answer.usage.prompt_tokens
    assert last.usage.prompt_tokens_details.cached_tokens > 0


def test_a_model_whose_template_takes_one_call_makes_one(client: openai.OpenAI) -> None:
    """Also where the client would take several: each turn can be followed by the next."""
    messages = list(_QUESTION)
    for _ in range(4):
        answer = client.chat.completions.create(
            model="llama", messages=messages, tools=[CHAT_TOOL], tool_choice="required"
        )
        message = answer.choices[0].message
        assert len(message.tool_calls) == 1
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "clouds"}
        messages += [message.model_dump(exclude_none=True), result]


def test_a_named_call_is_streamed_and_put_together(client: openai.OpenAI, model: str) -> None:
    named: Any = {"type": "function", "function": {"name": TOOL}}
    with client.chat.completions.stream(
        model=model, messages=_QUESTION, tools=[CHAT_TOOL], tool_choice=named
    ) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices

    (call,) = choice.message.tool_calls
    assert call.function.name == TOOL
    Asked.model_validate_json(call.function.arguments)
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert choice.finish_reason in ("stop", "tool_calls")


def test_an_answer_is_parsed_into_a_model_of_pydantic(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(model=model, messages=_QUESTION, response_format=Forecast)

    assert isinstance(answer.choices[0].message.parsed, Forecast)


def test_every_one_of_several_answers_follows_the_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="llama", messages=_QUESTION, response_format=Forecast, n=3, logprobs=True, top_logprobs=2
    )

    assert all(isinstance(choice.message.parsed, Forecast) for choice in answer.choices)
    assert len(answer.choices) == 3
    assert all(choice.logprobs.content for choice in answer.choices)


def test_a_thought_is_apart_from_the_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "qwen", "messages": _QUESTION, "max_tokens": 12, "n": 4, "seed": 1}
    thinking = client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    without = client.chat.completions.create(**asked, reasoning_effort="none")

    assert any(_thought(choice.message) for choice in thinking.choices)
    assert any(choice.message.content for choice in without.choices)
    assert not any(_thought(choice.message) for choice in without.choices)


def _thought(message: Any) -> str | None:
    return (message.model_extra or {}).get("reasoning_content")


def test_history_of_other_servers_is_taken(client: openai.OpenAI, model: str) -> None:
    call = {"id": "call_of_another_server_0001", "type": "function"}
    said = {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None, "annotations": []}
    arguments = '{"place": "Oslo", "days": 3}'
    messages: Any = [
        *_QUESTION,
        {**said, "tool_calls": [{**call, "function": {"name": TOOL, "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": forecast("Oslo", 3)}]},
    ]

    answer = client.chat.completions.create(model=model, messages=messages, tools=[CHAT_TOOL], max_tokens=4)

    assert answer.usage.completion_tokens > 0


def test_mistakes_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="qwen", messages=_QUESTION, tool_choice="required", max_tokens=4)
    assert caught.value.param == "tool_choice"
    schema: Any = {"type": "json_schema", "json_schema": {"name": "wrong", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="qwen", messages=_QUESTION, response_format=schema)
    assert "\n" not in caught.value.message


def test_embeddings_are_refused_in_one_sentence(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="qwen", input="some text")

    assert "embeddings" in caught.value.body["message"]


# --- completions ------------------------------------------------------------------------------------------------------


def test_a_prompt_is_echoed_with_its_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="llama", prompt="The sky is blue", echo=True, logprobs=2, max_tokens=3, temperature=0
    )

    (choice,) = answer.choices
    assert choice.text.startswith("The sky is blue")
    logprobs = choice.logprobs
    num_tokens = answer.usage.total_tokens
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == num_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


# --- Responses --------------------------------------------------------------------------------------------------------


def test_a_response_goes_on_from_the_one_before(client: openai.OpenAI, model: str) -> None:
    first = client.responses.create(model=model, instructions=SYSTEM, input=QUESTION, max_output_tokens=8)
    again = client.responses.create(
        model=model, input="And the day after?", max_output_tokens=8, previous_response_id=first.id
    )

    assert first.usage.output_tokens > 0
    assert again.previous_response_id == first.id
    assert again.usage.input_tokens > 8


def test_a_response_calls_a_tool_and_takes_its_result(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "tools": [RESPONSES_TOOL], "parallel_tool_calls": False}
    first = client.responses.create(**asked, input=QUESTION, tool_choice="required")
    (call,) = [item for item in first.output if item.type == "function_call"]
    arguments = Asked.model_validate_json(call.arguments)
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": forecast(arguments.place, arguments.days),
    }

    last = client.responses.create(
        **asked, input=[result], tool_choice="none", previous_response_id=first.id, max_output_tokens=8
    )

    assert call.name == TOOL
    assert last.usage.output_tokens > 0
    assert last.usage.input_tokens_details.cached_tokens > 0


def test_a_response_streams_a_call(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(
        model=model, input=QUESTION, tools=[RESPONSES_TOOL], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()

    (call,) = [item for item in final.output if item.type == "function_call"]
    Asked.model_validate_json(call.arguments)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds


def test_a_response_is_parsed_into_a_model_of_pydantic(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.parse(model=model, input=QUESTION, text_format=Forecast)

    assert isinstance(answer.output_parsed, Forecast)


_NOTE: Any = {
    "type": "custom",
    "name": "note",
    "description": "Writes a note.",
    "format": {"type": "grammar", "syntax": "regex", "definition": r"[a-z]{1,12}\n[0-9]{2}"},
}


def test_a_custom_tool_is_called_with_text_and_its_output_is_taken(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "tools": [_NOTE], "store": False}
    user = {"role": "user", "content": QUESTION}
    stream = client.responses.create(**asked, input=[user], tool_choice={"type": "custom", "name": "note"}, stream=True)
    events = list(stream)
    answer = events[-1].response
    (call,) = [item for item in answer.output if item.type == "custom_tool_call"]
    streamed = "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta")
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Written."}
    history = [user, *(item.model_dump(exclude_none=True) for item in answer.output), result]
    last = client.responses.create(**asked, input=history, tool_choice="none", max_output_tokens=8)

    assert re.fullmatch(r"[a-z]{1,12}\n[0-9]{2}", call.input)
    assert streamed == call.input
    assert last.usage.input_tokens_details.cached_tokens > 0


def test_a_chat_calls_a_custom_tool(client: openai.OpenAI, model: str) -> None:
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]{1,12}"}}
    tool: Any = {"type": "custom", "custom": {"name": "note", "format": form}}
    answer = client.chat.completions.create(model=model, messages=_QUESTION, tools=[tool], tool_choice="required")

    calls = answer.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert call.type == "custom"
        assert re.fullmatch("[a-z]{1,12}", call.custom.input)


def test_a_patch_is_an_item_of_its_own(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.create(
        model=model, input=QUESTION, tools=[{"type": "apply_patch"}], tool_choice={"type": "apply_patch"}
    )
    (call,) = [item for item in answer.output if item.type == "apply_patch_call"]
    result: Any = {"type": "apply_patch_call_output", "call_id": call.call_id, "status": "completed"}
    last = client.responses.create(
        model=model,
        input=[result],
        tools=[{"type": "apply_patch"}],
        tool_choice="none",
        previous_response_id=answer.id,
        max_output_tokens=8,
    )

    assert call.operation.type in ("create_file", "update_file", "delete_file")
    assert last.usage.input_tokens > answer.usage.input_tokens
