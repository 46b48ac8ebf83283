"""Every field of OpenAI's API: what the engine gets for it, or the error that names the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.api.limits import (
    INLINE_BODY_BYTES,
    MAX_ANSWERS,
    MAX_OUTPUT_CHOICES,
    MAX_PROMPTS,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_VALUES,
    MAX_TEMPLATE_DEPTH,
)
from kvtier.engine.grammar import JSON_OBJECT, MAX_GRAMMAR_CHARACTERS, Grammar
from kvtier.engine.process.messages import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from kvtier.engine.sampling_params import SamplingParams
from tests.support.examples import examples
from tests.support.fake_engine import FakeEngine, config_of, fake_engine, http_client, running
from tests.support.openai_asking import (
    CHAT,
    COMPLETIONS,
    Document,
    body_for,
    chat_body,
    completion_body,
    error_of,
)
from tests.support.waiting import FOR_EVER_S

_MAX_BODY_BYTES = 1 << 20
_CHAT_DEFAULTS = SamplingParams(max_tokens=None)
_COMPLETION_DEFAULTS = SamplingParams()


def deep_schema(depth: int) -> Document:
    schema: Document = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


class Asking:
    """A server that many tests ask."""

    def __init__(self, engine: FakeEngine, client: httpx.Client) -> None:
        self.engine = engine
        self.client = client

    def accepted(self, path: str, body: Document) -> Any:
        """The submit that a body became."""
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return self.engine.last

    def refused(self, path: str, body: Document) -> Document:
        """The error that a body got; the engine did not hear of it."""
        num_submits = len(self.engine.submits)
        response = self.client.post(path, json=body)
        assert response.status_code == 400, response.text
        assert len(self.engine.submits) == num_submits
        error = error_of(response)
        assert error["type"] == "invalid_request_error"
        return error


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    with fake_engine(tmp_path_factory.mktemp("requests")) as engine:
        with running("openai", config_of(engine, max_body_bytes=_MAX_BODY_BYTES)) as server:
            server.service.large_bodies.idle_s = FOR_EVER_S  # one process reads the large bodies of all tests
            with http_client(server) as client:
                client.post(COMPLETIONS, json=completion_body(prompt="x" * (INLINE_BODY_BYTES + 1)))
                yield Asking(engine, client)


# --- sampling ---------------------------------------------------------------------------------------------------------

SAMPLING: list[tuple[Document, Document]] = [
    ({"max_tokens": 2}, {"max_tokens": 2}),
    ({"max_tokens": 2.0}, {"max_tokens": 2}),
    ({"min_tokens": 1, "max_tokens": 2}, {"min_tokens": 1, "max_tokens": 2}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 1.5}, {"temperature": 1.5}),
    ({"temperature": 2}, {"temperature": 2.0}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_k": 5}, {"top_k": 5}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"min_p": 0.1}, {"min_p": 0.1}),
    ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"presence_penalty": -1}, {"presence_penalty": -1.0}),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    ({"seed": 7}, {"seed": 7}),
    ({"seed": (1 << 64) - 1}, {"seed": (1 << 64) - 1}),
    ({"n": 3}, {"n": 3}),
    ({"stop": "x"}, {"stop": ("x",)}),
    ({"stop": ["a", "b", "c", "d", "e"]}, {"stop": ("a", "b", "c", "d", "e")}),
    ({"stop": []}, {}),
    ({"stop": None, "temperature": None, "n": None, "stream": None, "logit_bias": None}, {}),
    ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (1, 2)}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"user": "somebody", "logit_bias": {}, "stream": False}, {}),
    ({"logit_bias": {"50256": -100, "7": 1.5, "0": 100}}, {"logit_bias": {50256: -100.0, 7: 1.5, 0: 100.0}}),
    ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}),
    ({"prompt_logprobs": 5, "max_tokens": 0}, {"prompt_logprobs": 5, "max_tokens": 0}),
    ({"prompt_cache_key": "a", "safety_identifier": "b", "metadata": {"a": "b"}}, {}),
    ({"stream": True}, {}),
    ({"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}, {}),
    ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {}),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, {}),
    ({"service_tier": "flex", "guided_decoding_backend": "xgrammar"}, {}),
    ({"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "echo": False, "priority": 0}, {}),
    ({"detokenize": True, "include_stop_str_in_output": False, "spaces_between_special_tokens": True}, {}),
    ({"store": False, "service_tier": "auto", "bad_words": [], "truncate_prompt_tokens": None}, {}),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "params"), SAMPLING, ids=lambda one: msgspec.json.encode(one).decode())
def test_a_sampling_field_reaches_the_engine(asking: Asking, path: str, fields: Document, params: Document) -> None:
    defaults = _CHAT_DEFAULTS if path == CHAT else _COMPLETION_DEFAULTS

    submit = asking.accepted(path, body_for(path, **fields))

    assert submit.params == msgspec.structs.replace(defaults, **params)
    assert submit.salt == ""


CHAT_FIELDS: list[tuple[Document, Document]] = [
    ({"max_completion_tokens": 2}, {"max_tokens": 2}),
    ({"max_completion_tokens": 2, "max_tokens": 2}, {"max_tokens": 2}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
    ({"logprobs": False}, {}),
    ({"top_logprobs": 0}, {}),
    ({"logprobs": False, "top_logprobs": 0}, {}),
    ({"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": [], "function_call": "auto"}, {}),
    ({"response_format": {"type": "text"}, "modalities": ["text"], "store": False, "metadata": {}}, {}),
    ({"service_tier": "auto", "verbosity": "medium", "audio": None, "prediction": None}, {}),
    ({"prediction": {"type": "content", "content": "x"}}, {}),
    ({"service_tier": "default", "reasoning_effort": None, "web_search_options": None}, {}),
    ({"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False}, {}),
    ({"reasoning_effort": "none", "echo": False, "best_of": 1, "documents": [], "chat_template": None}, {}),
]


@pytest.mark.parametrize(("fields", "params"), CHAT_FIELDS, ids=lambda one: msgspec.json.encode(one).decode())
def test_a_field_of_chat_reaches_the_engine(asking: Asking, fields: Document, params: Document) -> None:
    submit = asking.accepted(CHAT, chat_body(**fields))

    assert submit.params == msgspec.structs.replace(_CHAT_DEFAULTS, **params)


COMPLETION_FIELDS: list[tuple[Document, Document]] = [
    ({"logprobs": 0}, {"logprobs": 0}),
    ({"logprobs": 5}, {"logprobs": 5}),
    ({"echo": False, "suffix": "", "best_of": 1}, {}),
    ({"echo": True, "stream": True}, {}),
    ({"echo": True, "max_tokens": 0}, {"max_tokens": 0, "prompt_logprobs": 0}),
    ({"echo": True, "logprobs": 1, "prompt_logprobs": 3}, {"logprobs": 1, "prompt_logprobs": 3}),
    ({"echo": True, "prompt_logprobs": 3}, {"prompt_logprobs": 3}),
    ({"best_of": 2, "n": 2}, {"n": 2}),
]


@pytest.mark.parametrize(("fields", "params"), COMPLETION_FIELDS, ids=lambda one: msgspec.json.encode(one).decode())
def test_a_field_of_completions_reaches_the_engine(asking: Asking, fields: Document, params: Document) -> None:
    submit = asking.accepted(COMPLETIONS, completion_body(**fields))

    assert submit.params == msgspec.structs.replace(_COMPLETION_DEFAULTS, **params)


WRONG: list[tuple[Document, str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1 << 64}, "max_tokens"),
    ({"max_tokens": 1e300}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.01}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 10**300}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"seed": "x"}, "seed"),
    ({"seed": 1 << 64}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": [1 << 70]}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"stream": True, "stream_options": {"include_obfuscation": "x"}}, "stream_options.include_obfuscation"),
    ({"guided_decoding_backend": 1}, "guided_decoding_backend"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 1}, "cache_salt"),
    ({"user": 1}, "user"),
    ({"prompt_cache_key": 1}, "prompt_cache_key"),
    ({"safety_identifier": ["a"]}, "safety_identifier"),
    ({"metadata": "a"}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": "5"}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"2147483648": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"5": {}}}, "logit_bias"),
    ({"logit_bias": {"5": 10**400}}, "logit_bias"),
    ({"logit_bias": {str(number): 1 for number in range(301)}}, "logit_bias"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": "1"}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"temprature": 1}, "temprature"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": ["a"]}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": ["a"] * (MAX_OUTPUT_CHOICES + 1)}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_grammar": {}}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "guided_regex"),
    ({"guided_json": deep_schema(MAX_SCHEMA_DEPTH + 1)}, "guided_json"),
    ({"guided_json": {"enum": list(range(MAX_SCHEMA_VALUES))}}, "guided_json"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"response_format": {"json_schema": {"schema": 1}, "type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "text", "color": 1}}, "response_format.color"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "parameter"), WRONG, ids=lambda one: repr(one)[:60])
def test_a_field_that_cannot_be_served_is_named(asking: Asking, path: str, fields: Document, parameter: str) -> None:
    error = asking.refused(path, body_for(path, **fields))

    assert error["param"] == parameter
    assert parameter.rpartition(".")[2] in error["message"]


GRAMMARS: list[tuple[Document, Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_regex": None}, None),
    ({"response_format": {"type": "json_object"}}, JSON_OBJECT),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "description": "y", "strict": True, "schema": {"b": 1, "a": [2.5]}},
            }
        },
        Grammar("json_schema", '{"b": 1, "a": [2.5]}'),
    ),
    ({"guided_json": {"type": "null"}}, Grammar("json_schema", '{"type": "null"}')),
    ({"guided_json": '{"type":"null"}'}, Grammar("json_schema", '{"type": "null"}')),
    ({"guided_json": deep_schema(MAX_SCHEMA_DEPTH)}, Grammar("json_schema", str(deep_schema(64)).replace("'", '"'))),
    ({"guided_regex": "[ab]+"}, Grammar("regex", "[ab]+")),
    ({"guided_choice": ["a", 'b"']}, Grammar("lark", r'''start: "a" | "b\""''')),
    ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
    ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar("lark", 'start: "a"')),
    ({"structured_outputs": {"json_object": True}}, JSON_OBJECT),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": None}}, Grammar("json_schema", "{}")),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, Grammar("regex", "a")),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "grammar"), GRAMMARS, ids=lambda one: repr(one)[:60])
def test_the_form_of_an_answer_is_a_grammar(
    asking: Asking, path: str, fields: Document, grammar: Grammar | None
) -> None:
    assert asking.accepted(path, body_for(path, **fields)).params.grammar == grammar


_TOOL = {"type": "function", "function": {"name": "f"}}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

WRONG_IN_CHAT: list[tuple[Document, str]] = [
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"echo": True}, "echo"),
    ({"max_completion_tokens": []}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
    ({"tools": [_TOOL, _TOOL]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [_TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"store": 0}, "store"),
    ({"service_tier": 1}, "service_tier"),
    ({"verbosity": "much"}, "verbosity"),
    ({"enable_thinking": "no"}, "enable_thinking"),
    ({"thinking": {"type": "much"}}, "thinking.type"),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"reasoning_effort": "most"}, "reasoning_effort"),
    ({"include_reasoning": "no"}, "include_reasoning"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"best_of": 2}, "best_of"),
    ({"prediction": "x"}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"prompt": "x"}, "prompt"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": 1 << 70}}, "chat_template_kwargs"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [_CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning": []}]}, "messages[0].reasoning"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "x", "color": "red"}]}, "messages[0].color"),
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
    ({"messages": [{"role": "assistant", "content": "x", "thinking_blocks": "x"}]}, "messages[0].thinking_blocks"),
    ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "1"}}]}, "messages[0].audio"),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[1].tool_calls[0].function",
    ),
    ({"messages": [{"role": "assistant", "content": "", "refusal": "no"}]}, "messages[0].refusal"),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[1].content[0]",
    ),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}]},
        "messages[0].content[0].more",
    ),
]


@pytest.mark.parametrize(("fields", "parameter"), WRONG_IN_CHAT, ids=lambda one: repr(one)[:60])
def test_a_field_of_chat_that_cannot_be_served_is_named(asking: Asking, fields: Document, parameter: str) -> None:
    error = asking.refused(CHAT, {**chat_body(), **fields})

    assert error["param"] == parameter


WRONG_IN_COMPLETIONS: list[tuple[Document, str]] = [
    ({"echo": 1}, "echo"),
    ({"echo": True, "suffix": "end"}, "echo"),
    ({"suffix": 1}, "suffix"),
    ({"suffix": "end", "prompt": [1, 2]}, "suffix"),
    ({"suffix": "end", "prompt": [[1], [2]]}, "suffix"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["x", 1]}, "prompt"),
    ({"prompt": [[1], "x"]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [1, 1 << 40]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["x"] * (MAX_PROMPTS + 1)}, "prompt"),
    ({"prompt": ["x"] * (MAX_ANSWERS // 4 + 1), "n": 4}, "n"),
]


@pytest.mark.parametrize(("fields", "parameter"), WRONG_IN_COMPLETIONS, ids=lambda one: repr(one)[:60])
def test_a_field_of_completions_that_cannot_be_served_is_named(
    asking: Asking, fields: Document, parameter: str
) -> None:
    error = asking.refused(COMPLETIONS, {**completion_body(), **fields})

    assert error["param"] == parameter


def test_a_misspelt_field_gets_the_nearest_known_one(asking: Asking) -> None:
    assert "did you mean temperature?" in asking.refused(CHAT, chat_body(temprature=1))["message"]


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_conversation_reaches_the_engine(asking: Asking) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "audio": None, "annotations": []},
        {"role": "user", "content": "one two", "name": "ann"},
    ]

    submit = asking.accepted(CHAT, {**chat_body(), "messages": messages, "chat_template_kwargs": {"thinking": False}})

    assert submit.prompt == ChatPrompt(
        [
            ChatMessage("system", "be brief"),
            ChatMessage("system", "be kind"),
            ChatMessage("user", "hello there"),
            ChatMessage("assistant", "hi"),
            ChatMessage("user", "one two", "ann"),
        ],
        {"thinking": False},
    )


SENT_BACK: list[tuple[Document, ChatMessage]] = [
    ({"provider_specific_fields": {"citations": None, "x": 1}}, ChatMessage("assistant", "hi")),
    ({"parsed": {"town": "Oslo"}, "refusal": "", "function_call": None}, ChatMessage("assistant", "hi")),
    ({"images": [], "audio": None, "annotations": [{"type": "url_citation"}]}, ChatMessage("assistant", "hi")),
    ({"id": "msg_1", "unheard_of": {"of": "it"}}, ChatMessage("assistant", "hi")),
    ({"thinking_blocks": []}, ChatMessage("assistant", "hi")),
    (
        {
            "thinking_blocks": [
                {"type": "thinking", "thinking": "One. ", "signature": "abc"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "thinking", "thinking": "Two.", "signature": "abc"},
            ]
        },
        ChatMessage("assistant", "hi", reasoning="One. Two."),
    ),
    (
        {"thinking_blocks": [{"type": "thinking", "thinking": "One."}], "reasoning_content": "Other."},
        ChatMessage("assistant", "hi", reasoning="Other."),
    ),
    ({"content": [{"type": "text", "text": "hi", "provider_specific_fields": {}}]}, ChatMessage("assistant", "hi")),
]


@pytest.mark.parametrize(("fields", "expected"), SENT_BACK, ids=lambda one: repr(one)[:60])
def test_what_clients_send_back_with_an_answer_is_taken(asking: Asking, fields: Document, expected: object) -> None:
    answer = {"role": "assistant", "content": "hi", **fields}
    more = {"provider_specific_fields": {"a": 1}, "images": [], "metadata": {}, "id": "1"}
    messages = [{"role": "user", "content": "x", **more}, answer, {"role": "user", "content": "y"}]

    prompt = asking.accepted(CHAT, {**chat_body(), "messages": messages}).prompt

    assert prompt.messages == [ChatMessage("user", "x"), expected, ChatMessage("user", "y")]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one two", [TextPrompt("one two")]),
        (["one", "two"], [TextPrompt("one"), TextPrompt("two")]),
        ([1, 2], [TokenPrompt([1, 2])]),
        ([[1], [2, 3]], [TokenPrompt([1]), TokenPrompt([2, 3])]),
        ("", [TextPrompt("")]),
    ],
)
def test_prompts_of_each_form_reach_the_engine(asking: Asking, prompt: object, expected: list[object]) -> None:
    asking.accepted(COMPLETIONS, completion_body(prompt))

    assert [submit.prompt for submit in asking.engine.submits[-len(expected) :]] == expected


def test_several_prompts_have_ids_of_their_own(asking: Asking) -> None:
    response = asking.client.post(COMPLETIONS, json=completion_body(["one", "two"]))

    ids = [submit.request_id for submit in asking.engine.submits[-2:]]
    assert ids == [f"{response.json()['id']}-0", f"{response.json()['id']}-1"]


def test_one_prompt_has_the_id_of_the_answer(asking: Asking) -> None:
    response = asking.client.post(CHAT, json=chat_body())

    assert response.json()["id"] == asking.engine.last.request_id
    assert response.headers["x-request-id"] == asking.engine.last.request_id


# --- defaults ---------------------------------------------------------------------------------------------------------


def test_the_models_default_options_hold_for_fields_that_are_absent(tmp_path_factory: pytest.TempPathFactory) -> None:
    defaults: dict[str, object] = {"temperature": 0.6, "top_k": 20, "max_tokens": 2, "stop": ["END"]}
    with fake_engine(tmp_path_factory.mktemp("defaults")) as engine:
        with running("openai", config_of(engine, default_options=defaults)) as server, http_client(server) as client:
            for path in (CHAT, COMPLETIONS):
                client.post(path, json=body_for(path, temperature=0.1))
                expected = SamplingParams(temperature=0.1, top_k=20, max_tokens=2, stop=("END",))
                assert engine.last.params == expected
            client.post(CHAT, json=chat_body(max_completion_tokens=1, stop="x"))
            assert engine.last.params == SamplingParams(temperature=0.6, top_k=20, max_tokens=1, stop=("x",))


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b'{"model": "tiny",}',
        b'{"model": NaN}',
        b'{"model": 1e999}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"model": "tiny", "messages": ' + b"[" * 100_000,
        b"[]",
        b'"text"',
        b"null",
        b"17",
    ],
    ids=lambda body: repr(body[:20]),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_body_that_is_no_json_object_is_refused(asking: Asking, path: str, body: bytes) -> None:
    response = asking.client.post(path, content=body)

    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


@pytest.mark.parametrize("levels", [MAX_TEMPLATE_DEPTH + 1, 500, 900, 950, 990])
@pytest.mark.parametrize("field", ["chat_template_kwargs", "temperature", "messages", "tools", "unknown"])
def test_deep_nesting_is_refused_wherever_it_is(asking: Asking, field: str, levels: int) -> None:
    nested = b'{"a":' * levels + b"1" + b"}" * levels
    fields = {name: value for name, value in chat_body().items() if name != field}
    body = msgspec.json.encode(fields)[:-1] + b',"' + field.encode() + b'":' + nested + b"}"

    response = asking.client.post(CHAT, content=body)

    assert response.status_code == 400
    assert error_of(response)["param"] in (field, None)


def test_template_values_may_be_nested_a_little(asking: Asking) -> None:
    values: dict[str, object] = {"a": {"b": [1, {"c": [None, True, "x", 0.5]}]}}

    assert asking.accepted(CHAT, chat_body(chat_template_kwargs=values)).prompt.template_values == values


def test_a_huge_body_is_refused_and_the_server_goes_on(asking: Asking) -> None:
    response = asking.client.post(CHAT, content=b'{"model": "' + b"x" * _MAX_BODY_BYTES + b'"}')

    assert response.status_code == 413
    assert error_of(response)["type"] == "invalid_request_error"
    asking.accepted(CHAT, chat_body())


def test_what_is_long_is_not_sent_back_whole(asking: Asking) -> None:
    for fields in ({"x" * 100_000: 1}, {"stop": ["", "x" * 100_000]}, {"model": "x" * 100_000}):
        response = asking.client.post(CHAT, json=chat_body(**fields))
        assert 400 <= response.status_code < 500
        assert len(response.content) < 2000


_FIELDS = (
    *(
        "model",
        "messages",
        "prompt",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
    ),
    *("presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "stream", "stream_options", "user", "echo"),
    *("cache_salt", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "best_of"),
    *("skip_special_tokens", "chat_template_kwargs", "logit_bias", "tools", "response_format", "metadata", "suffix"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name", "include_usage", "x"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(200), deadline=None)
@given(path=st.sampled_from([CHAT, COMPLETIONS]), fields=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3))
def test_no_value_in_any_field_is_the_servers_fault(asking: Asking, path: str, fields: Document) -> None:
    response = asking.client.post(path, content=msgspec.json.encode({**body_for(path), **fields}))

    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response)


@settings(max_examples=examples(100), deadline=None)
@given(body=st.binary(max_size=64))
def test_no_bytes_are_the_servers_fault(asking: Asking, body: bytes) -> None:
    assert asking.client.post(CHAT, content=body).status_code in (400, 404)
