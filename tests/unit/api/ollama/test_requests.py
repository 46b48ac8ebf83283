"""Bodies of /api/generate and /api/chat: the prompts they become, and what is refused."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvtier.api.engine_connection import EngineConnection
from kvtier.api.engines import Engines, ServedModel
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody
from kvtier.api.ollama.options import sampling_params
from kvtier.api.ollama.requests import MAX_DURATION_CHARACTERS, LoadModel, find_model, read_chat, read_generate
from kvtier.engine.grammar import JSON_OBJECT, Grammar
from kvtier.engine.process.messages import ChatMessage, ChatPrompt, EngineHello, TextPrompt
from kvtier.errors import EngineAway
from tests.support.fake_engine import HELLO, MODEL

BARE = msgspec.structs.replace(HELLO, chat_template="")
USER = {"role": "user", "content": "hi"}


def engines_of(hello: EngineHello | None = HELLO, *names: str) -> Engines:
    connection = EngineConnection("engine-0", "/nowhere")
    connection.hello = hello
    return Engines([ServedModel(names or (MODEL,), [connection])])


def generate(*, hello: EngineHello | None = HELLO, **fields: object) -> GenerationRequest | LoadModel:
    return read_generate(JsonBody({"model": MODEL, **fields}), engines_of(hello))


def chat(*, hello: EngineHello | None = HELLO, **fields: object) -> GenerationRequest | LoadModel:
    return read_chat(JsonBody({"model": MODEL, **fields}), engines_of(hello))


def prompt_of(asked: GenerationRequest | LoadModel) -> object:
    assert isinstance(asked, GenerationRequest)
    [prompt] = asked.prompts
    return prompt


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "other", "other:latest"])
def test_a_model_is_found_with_and_without_latest(name: str) -> None:
    assert find_model(engines_of(HELLO, "tiny", "other:latest"), name).name == "tiny"


def test_an_unknown_model_is_answered_with_those_there_are() -> None:
    with pytest.raises(HttpError, match="model 'big' not found; available: tiny") as caught:
        find_model(engines_of(), "big")

    assert caught.value.status == 404


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_goes_through_the_models_chat_template() -> None:
    assert prompt_of(generate(prompt="hi")) == ChatPrompt([ChatMessage("user", "hi")])


def test_a_system_text_is_the_first_message() -> None:
    expected = ChatPrompt([ChatMessage("system", "be brief"), ChatMessage("user", "hi")])

    assert prompt_of(generate(prompt="hi", system="be brief")) == expected


def test_a_raw_prompt_stays_as_it_is() -> None:
    assert prompt_of(generate(prompt="hi", raw=True)) == TextPrompt("hi")


def test_without_a_chat_template_the_system_text_stands_before_the_prompt() -> None:
    assert prompt_of(generate(hello=BARE, prompt="hi")) == TextPrompt("hi")
    assert prompt_of(generate(hello=BARE, prompt="hi", system="be brief")) == TextPrompt("be brief\n\nhi")


def test_a_conversation_is_handed_over_message_by_message() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "User", "content": "hi"},
        {"role": "assistant", "content": "hello", "images": [], "tool_calls": [], "thinking": ""},
        {"role": "user"},
    ]

    assert prompt_of(chat(messages=messages)) == ChatPrompt(
        [
            ChatMessage("system", "be brief"),
            ChatMessage("user", "hi"),
            ChatMessage("assistant", "hello"),
            ChatMessage("user", ""),
        ]
    )


def test_whether_a_model_has_a_chat_template_is_the_engines_to_say() -> None:
    assert isinstance(prompt_of(chat(hello=BARE, messages=[USER])), ChatPrompt)


@pytest.mark.parametrize("think", [False, None])
def test_think_false_is_told_to_a_template_that_asks(think: bool | None) -> None:
    hello = msgspec.structs.replace(HELLO, chat_template="{% if enable_thinking %}{% endif %}")

    prompts = [
        prompt_of(chat(hello=hello, messages=[USER], think=think)),
        prompt_of(generate(hello=hello, prompt="hi", think=think)),
    ]

    values: dict[str, object] = {"enable_thinking": False} if think is False else {}
    assert prompts == [ChatPrompt([ChatMessage("user", "hi")], values)] * 2


def test_think_false_is_not_told_to_a_template_that_knows_nothing_of_it() -> None:
    assert prompt_of(chat(messages=[USER], think=False)) == ChatPrompt([ChatMessage("user", "hi")])


def test_answers_are_streamed_unless_asked_otherwise() -> None:
    asked = [generate(prompt="hi"), generate(prompt="hi", stream=True), generate(prompt="hi", stream=False)]

    assert [isinstance(one, GenerationRequest) and one.is_streamed for one in asked] == [True, True, False]


def test_logprobs_are_asked_for_with_as_many_others_as_wanted() -> None:
    asked = [generate(prompt="hi", logprobs=True), generate(prompt="hi", logprobs=True, top_logprobs=3)]

    assert [one.params.logprobs for one in asked if isinstance(one, GenerationRequest)] == [0, 3]


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keep_alive", [None, 300, -1, 0.5, "5m", "-1", "1h30m", "1.5h", "300ms", "-5m", ".5s"], ids=repr
)
def test_without_a_prompt_there_is_only_the_model_to_load(keep_alive: object) -> None:
    assert generate(keep_alive=keep_alive) == LoadModel(MODEL, "load")
    assert chat(keep_alive=keep_alive, messages=[]) == LoadModel(MODEL, "load")


@pytest.mark.parametrize("keep_alive", [0, 0.0, "0", "0s", "0h0m", "-0"], ids=repr)
def test_without_a_prompt_and_time_it_is_unloaded(keep_alive: object) -> None:
    assert generate(prompt="", keep_alive=keep_alive) == LoadModel(MODEL, "unload")
    assert chat(keep_alive=keep_alive) == LoadModel(MODEL, "unload")


@pytest.mark.parametrize("keep_alive", ["soon", "", "5 m", "5x", "m", "1h30", "1.m.", ".", True, [], {}], ids=repr)
def test_a_duration_that_is_none_is_refused(keep_alive: object) -> None:
    with pytest.raises(HttpError, match="keep_alive must be"):
        generate(prompt="hi", keep_alive=keep_alive)


@pytest.mark.parametrize("keep_alive", ["1" * 1_000_000 + "x", "1h" * 1_000_000 + "x", "." * 1_000_000])
def test_a_long_duration_is_refused_without_being_searched(keep_alive: str) -> None:
    with pytest.raises(HttpError, match="keep_alive must be") as refused:
        generate(prompt="hi", keep_alive=keep_alive)
    assert len(refused.value.sentence) < 200


def test_a_duration_has_as_many_characters_as_the_limit_says() -> None:
    assert generate(keep_alive="1" * (MAX_DURATION_CHARACTERS - 1) + "s") == LoadModel(MODEL, "load")
    with pytest.raises(HttpError, match="keep_alive must be"):
        generate(keep_alive="1" * MAX_DURATION_CHARACTERS + "s")


def test_options_that_cannot_work_are_told_when_the_model_is_loaded() -> None:
    with pytest.raises(HttpError, match="num_ctx"):
        generate(options={"num_ctx": 0})


@pytest.mark.parametrize("fields", [{"prompt": "hi"}, {}])
def test_a_model_whose_engines_are_away_is_not_asked_nor_loaded(fields: dict[str, object]) -> None:
    with pytest.raises(EngineAway):
        generate(hello=None, **fields)


def test_a_suffix_asks_for_what_stands_between_and_has_no_template() -> None:
    asked = generate(prompt="def f(", suffix="return x")

    assert isinstance(asked, GenerationRequest)
    assert asked.prompts == [TextPrompt("def f(", suffix="return x")]
    with pytest.raises(HttpError, match="suffix cannot be combined with system"):
        generate(prompt="def f(", suffix="return x", system="be brief")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_clients_send_empty_is_not_asked_for() -> None:
    empty = {"suffix": "", "template": "", "context": [], "images": [], "format": "", "think": False, "system": ""}

    assert isinstance(generate(prompt="hi", truncate=False, shift=False, **empty), GenerationRequest)
    assert isinstance(chat(messages=[USER], tools=[], format="", think=None), GenerationRequest)


def test_the_form_of_an_answer_is_a_grammar() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    objects, between, person, free = (
        generate(prompt="hi", format="json"),
        generate(prompt="def f(", suffix="return x", format="json"),
        chat(messages=[USER], format=schema),
        chat(messages=[USER], format={}),
    )

    assert isinstance(objects, GenerationRequest)
    assert isinstance(between, GenerationRequest)
    assert isinstance(person, GenerationRequest)
    assert isinstance(free, GenerationRequest)
    assert objects.params.grammar == between.params.grammar == JSON_OBJECT
    assert person.params.grammar == Grammar("json_schema", json.dumps(schema))
    assert free.params.grammar is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", 5),
        ("template", "{{ .Prompt }}"),
        ("context", [1, 2]),
        ("images", ["aGk="]),
        ("format", "xml"),
        ("format", ["json"]),
        ("think", True),
        ("think", "high"),
        ("truncate", True),
        ("shift", True),
        ("top_logprobs", 3),
        ("prompt", ["hi"]),
        ("stream", "yes"),
        ("options", []),
        ("raw", 1),
        ("logprobs", 5),
    ],
)
def test_a_field_of_generate_that_is_not_served_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(HttpError) as caught:
        generate(**{"prompt": "hi", name: value})

    assert caught.value.status == 400
    assert caught.value.sentence.startswith(name)


def test_a_field_that_ollama_does_not_know_is_passed_over() -> None:
    generated, chatted = generate(prompt="hi", unheard_of={"of": "it"}, temperature=1), chat(messages=[USER], unheard=1)

    assert isinstance(generated, GenerationRequest)
    assert isinstance(chatted, GenerationRequest)
    assert generated.params == chatted.params == sampling_params(JsonBody({}), {}, logprobs=None)


def test_a_field_of_a_message_that_ollama_does_not_know_is_passed_over() -> None:
    more = {"provider_specific_fields": {"a": 1}, "reasoning_content": "x", "unheard_of": [1]}
    messages = [{**USER, **more}, {"role": "assistant", "content": "hello", **more}, USER]

    asked = prompt_of(chat(messages=messages))

    assert asked == ChatPrompt(
        [ChatMessage("user", "hi"), ChatMessage("assistant", "hello"), ChatMessage("user", "hi")]
    )


def test_raw_does_not_go_with_a_system_text() -> None:
    with pytest.raises(HttpError, match="raw cannot be combined with system"):
        generate(prompt="hi", raw=True, system="be brief")


def test_tools_are_refused_for_a_template_that_does_not_know_them() -> None:
    with pytest.raises(HttpError, match="tools are not supported by tiny"):
        chat(messages=[USER], tools=[{"type": "function", "function": {"name": "f"}}])


def test_tools_of_one_name_are_refused() -> None:
    with pytest.raises(HttpError, match="tools must have different names"):
        chat(messages=[USER], tools=[{"type": "function", "function": {"name": "f"}}] * 2)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("hi", "messages[0] must be an object"),
        ({"content": "hi"}, "messages[0].role is missing"),
        ({"role": "ipython", "content": "4"}, "messages[0].role must be system, user, assistant or tool"),
        ({"role": "user", "content": ["hi"]}, "messages[0].content must be text"),
        ({"role": "user", "content": "hi", "images": ["aGk="]}, "messages[0].images"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "content": "", "thinking": 1}, "messages[0].thinking"),
    ],
)
def test_a_message_that_is_not_served_is_refused_by_its_place(message: object, words: str) -> None:
    with pytest.raises(HttpError) as caught:
        chat(messages=[message])

    assert words in caught.value.sentence


def test_an_answer_of_the_assistant_is_not_continued() -> None:
    with pytest.raises(HttpError, match="must not end with an assistant message"):
        chat(messages=[USER, {"role": "assistant", "content": "he"}])


def test_messages_that_are_no_list_are_refused() -> None:
    with pytest.raises(HttpError, match="messages must be a list"):
        chat(messages="hi")
