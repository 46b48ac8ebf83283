"""Tools and thoughts in OpenAI's chat API, as the official client reads them, over an engine without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from kvtier.api.limits import INLINE_BODY_BYTES
from kvtier.engine.process.messages import ChatMessage, ChatPrompt, ToolCall
from tests.support.chat_templates import TEMPLATES, THINKING, answer_text
from tests.support.fake_engine import MODEL, FakeEngine, Running, config_of, fake_engine, http_client, running
from tests.support.openai_asking import CHAT, Document, chat_body, documents_of, error_of
from tests.support.scripted_chat import TOOL, hello_with, saying

USER: Any = [{"role": "user", "content": "how is the weather?"}]
TOOLS: Any = [TOOL]
_CALLS: list[tuple[str, dict[str, object]]] = [("weather", {"town": "Köln"}), ("weather", {"town": 'O"X'})]
_TEXT = answer_text(THINKING, _CALLS, text="I look.", reasoning="Two towns.")


@pytest.fixture(scope="module")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path_factory.mktemp("tools"), hello=hello_with(THINKING)) as one:
        yield one


@pytest.fixture(scope="module")
def server(_engine: FakeEngine) -> Iterator[Running]:
    with running("openai", config_of(_engine)) as one:
        yield one


@pytest.fixture
def engine(_engine: FakeEngine) -> FakeEngine:
    _engine.script = saying(_TEXT)
    return _engine


@pytest.fixture
def client(server: Running, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as one:
        yield one


@pytest.fixture
def http(server: Running, engine: FakeEngine) -> Iterator[httpx.Client]:
    with http_client(server) as one:
        yield one


def prompt_of(engine: FakeEngine) -> ChatPrompt:
    prompt = engine.last.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_whole_answer_has_its_calls_and_its_thought(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS)

    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.model_extra == {"reasoning_content": "Two towns.", "reasoning": "Two towns."}
    calls = choice.message.tool_calls or []
    assert [
        (one.type, one.function.name, json.loads(one.function.arguments)) for one in calls if one.type == "function"
    ] == [("function", *call) for call in _CALLS]
    assert len({one.id for one in calls}) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == -(-len("<think>\nTwo towns.\n</think>") // 3)


def joined(chunks: list[ChatCompletionChunk], choice: int = 0) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """Join deltas like clients."""
    text = reasoning = ""
    calls: list[tuple[str, str]] = []
    reason = None
    for chunk in chunks:
        for one in chunk.choices:
            if one.index != choice:
                continue
            text += one.delta.content or ""
            reasoning += (one.delta.model_extra or {}).get("reasoning_content") or ""
            for call in one.delta.tool_calls or ():
                assert call.function is not None
                if call.id is not None:
                    assert (call.index, call.type, call.function.arguments) == (len(calls), "function", "")
                    assert call.function.name is not None
                    calls.append((call.function.name, ""))
                else:
                    assert (call.index, call.function.name) == (len(calls) - 1, None)
                    calls[-1] = (calls[-1][0], calls[-1][1] + (call.function.arguments or ""))
            reason = one.finish_reason or reason
    return text, reasoning, calls, reason


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_deltas_join_to_the_whole_answer(client: openai.OpenAI, engine: FakeEngine, piece: int) -> None:
    engine.script = saying(_TEXT, piece=piece)

    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=USER, tools=TOOLS, stream=True, stream_options={"include_usage": True}, n=2
        )
    )

    for choice in (0, 1):
        text, reasoning, calls, reason = joined(chunks, choice)
        assert (text, reasoning, reason) == ("I look.", "Two towns.", "tool_calls")
        assert [(name, json.loads(arguments)) for name, arguments in calls] == _CALLS
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens


def test_arguments_are_passed_on_before_they_are_complete(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, stream=True))

    pieces = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert len(pieces) > 8


def test_the_clients_own_stream_joins_them_too(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=USER, tools=TOOLS) as stream:
        final = stream.get_final_completion()

    calls = final.choices[0].message.tool_calls or []
    assert [json.loads(one.function.arguments) for one in calls] == [arguments for _, arguments in _CALLS]


def test_without_tools_the_same_text_is_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER)

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == _TEXT.partition("</think>\n\n")[2]


def test_only_calls_leave_no_content(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying(answer_text(THINKING, _CALLS))

    message = http.post(CHAT, json=chat_body(tools=TOOLS)).json()["choices"][0]["message"]

    assert message["content"] is None
    assert "reasoning_content" not in message


def test_an_answer_that_is_cut_in_a_call_says_so(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying(_TEXT[:-30], reason="length")

    [choice] = client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS).choices

    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None


def test_a_thought_may_begin_in_the_prompt(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("Hm.\n</think>\n\nFine.", prompt_end="<|assistant|>\n<think>\n")

    whole = client.chat.completions.create(model=MODEL, messages=USER).choices[0].message
    chunks = list(client.chat.completions.create(model=MODEL, messages=USER, stream=True))

    assert (whole.content, (whole.model_extra or {})["reasoning"]) == ("Fine.", "Hm.")
    assert joined(chunks) == ("Fine.", "Hm.", [], "stop")


def test_a_thought_can_be_left_out(client: openai.OpenAI) -> None:
    body = {"include_reasoning": False}

    [choice] = client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, extra_body=body).choices

    assert choice.message.content == "I look."
    assert choice.message.model_extra == {}


def test_logprobs_come_with_every_token_however_its_text_is_shown(http: httpx.Client) -> None:
    body = chat_body(tools=TOOLS, logprobs=True)

    whole = http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    streamed = documents_of(http.post(CHAT, json={**body, "stream": True}).text)

    shown = [one["choices"][0]["logprobs"] for one in streamed]
    tokens = [token for one in shown if one is not None for token in one["content"]]
    assert tokens == whole
    assert "".join(token["token"] for token in whole) == _TEXT


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_history_with_tools_reaches_the_template(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS).choices[0].message
    sent_back = answer.model_dump()
    assert answer.tool_calls is not None
    call_ids = [call.id for call in answer.tool_calls]
    history: Any = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        *USER,
        {**sent_back, "annotations": [], "refusal": None, "content": None},
        *({"role": "tool", "tool_call_id": one, "content": [{"type": "text", "text": "rain"}]} for one in call_ids),
    ]

    client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)

    calls = [ToolCall(name, arguments, call_id) for (name, arguments), call_id in zip(_CALLS, call_ids, strict=True)]
    messages = prompt_of(engine).messages
    assert messages[0] == ChatMessage("system", "Be brief.")
    assert (messages[2].role, messages[2].content, messages[2].reasoning) == ("assistant", "", "Two towns.")
    assert messages[2].tool_calls == calls
    assert messages[3:] == [ChatMessage("tool", "rain", "weather", call_id=one) for one in call_ids]
    assert prompt_of(engine).tools == TOOLS


@pytest.mark.parametrize("arguments", ["{oh", "[1]", '"x"', "[" * 5000])
def test_arguments_of_earlier_calls_may_be_anything(http: httpx.Client, engine: FakeEngine, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "no"}]

    assert http.post(CHAT, json={"model": MODEL, "messages": messages}).status_code == 200
    assert prompt_of(engine).messages[1].tool_calls == [ToolCall("weather", {"arguments": arguments}, "1")]


def test_a_large_body_is_answered_alike(client: openai.OpenAI) -> None:
    messages: Any = [*USER, {"role": "user", "content": "x" * INLINE_BODY_BYTES}]

    [choice] = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices

    assert choice.finish_reason == "tool_calls"
    assert choice.message.model_extra == {"reasoning_content": "Two towns.", "reasoning": "Two towns."}


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"enable_thinking": True}),
        ({"reasoning_effort": "minimal"}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({}, {}),
    ],
)
def test_how_much_the_model_thinks_is_told_to_its_template(
    http: httpx.Client, engine: FakeEngine, fields: Document, values: Document
) -> None:
    assert http.post(CHAT, json=chat_body(**fields)).status_code == 200
    assert prompt_of(engine).template_values == values


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},  # type: ignore[dict-item]
    ],
)
def test_what_must_hold_of_a_call_is_a_grammar(http: httpx.Client, engine: FakeEngine, fields: Document) -> None:
    assert http.post(CHAT, json=chat_body(**{"tools": TOOLS, **fields})).status_code == 200
    assert engine.last.params.grammar is not None
    assert prompt_of(engine).grammar_in_thought is not None


def test_a_mark_of_the_cache_is_not_for_the_template(http: httpx.Client, engine: FakeEngine) -> None:
    tools = [{**TOOL, "cache_control": {"type": "ephemeral"}}]

    assert http.post(CHAT, json=chat_body(tools=tools)).status_code == 200
    assert prompt_of(engine).tools == TOOLS


def test_a_model_without_tools_says_so(tmp_path: Path) -> None:
    with (
        fake_engine(tmp_path) as engine,
        running("openai", config_of(engine)) as server,
        http_client(server) as client,
    ):
        refused = client.post(CHAT, json=chat_body(tools=TOOLS))
        accepted = client.post(CHAT, json=chat_body(tools=TOOLS, tool_choice="none"))

    assert refused.status_code == 400
    assert "its chat template does not use them" in error_of(refused)["message"]
    assert accepted.status_code == 200


def test_special_tokens_that_are_marks_are_asked_for(tmp_path: Path) -> None:
    hello = hello_with(TEMPLATES["mistral"], {"[TOOL_CALLS]": 5, "</s>": 2})
    with (
        fake_engine(
            tmp_path, hello=hello, script=saying('[TOOL_CALLS] [{"name": "weather", "arguments": {}}]')
        ) as engine,
        running("openai", config_of(engine)) as server,
        http_client(server) as client,
    ):
        message = client.post(CHAT, json=chat_body(tools=TOOLS)).json()["choices"][0]["message"]

    assert engine.last.params.kept_special_tokens == ("[TOOL_CALLS]",)
    assert engine.last.params.skip_special_tokens
    assert len(message["tool_calls"][0]["id"]) == 9
