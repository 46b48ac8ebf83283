"""The shapes of OpenAI's answers, whole and streamed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import httpx
import pytest

from kvtier.engine.answer import StreamPiece
from kvtier.engine.grammar import DEAD_END
from kvtier.engine.process.messages import StepOutputs, Submit
from tests.support.fake_engine import (
    ALIAS,
    FakeEngine,
    Step,
    accepted,
    config_of,
    echo,
    ending,
    fake_engine,
    http_client,
    outputs,
    pieces,
    running,
    said,
)
from tests.support.openai_asking import (
    CHAT,
    COMPLETIONS,
    Document,
    body_for,
    chat_body,
    completion_body,
    documents_of,
    error_of,
)

_NOTHING_CACHED = {"cached_tokens": 0, "cached_tokens_by_tier": {"device": 0, "server": 0}}
_USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "prompt_tokens_details": _NOTHING_CACHED}


class Asking:
    def __init__(self, engine: FakeEngine, client: httpx.Client) -> None:
        self.engine = engine
        self._client = client

    def whole(self, path: str, body: Document) -> Document:
        response = self._client.post(path, json=body)
        assert response.status_code == 200, response.text
        document: Document = response.json()
        assert response.headers["x-request-id"] == document["id"]
        return document

    def stream(self, path: str, body: Document) -> list[Document]:
        response = self._client.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        documents = documents_of(response.text)
        assert {document["id"] for document in documents} == {response.headers["x-request-id"]}
        return documents

    def status(self, path: str, body: Document) -> httpx.Response:
        return self._client.post(path, json=body)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    with fake_engine(tmp_path_factory.mktemp("responses")) as engine:
        with running("openai", config_of(engine)) as server, http_client(server) as client:
            yield Asking(engine, client)


@pytest.fixture
def asking(served: Asking) -> Asking:
    served.engine.script = echo
    return served


# --- whole answers ----------------------------------------------------------------------------------------------------


def test_a_chat_has_openais_shape(asking: Asking) -> None:
    document = asking.whole(CHAT, chat_body())

    assert document["id"].startswith("chatcmpl-")
    assert document["created"] > 1_700_000_000
    del document["id"], document["created"]
    assert document == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "fp_0123456789ab",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "one two three", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": _USAGE,
    }


def test_a_completion_has_openais_shape(asking: Asking) -> None:
    document = asking.whole(COMPLETIONS, completion_body())

    assert document["id"].startswith("cmpl-")
    del document["id"], document["created"]
    assert document == {
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": "fp_0123456789ab",
        "choices": [{"index": 0, "text": "one two three", "logprobs": None, "finish_reason": "stop"}],
        "usage": _USAGE,
    }


def test_the_model_is_called_as_the_client_calls_it(asking: Asking) -> None:
    assert asking.whole(CHAT, chat_body(model=ALIAS))["model"] == ALIAS
    assert asking.stream(CHAT, chat_body(model=ALIAS))[0]["model"] == ALIAS


def test_an_answer_that_was_cut_says_so(asking: Asking) -> None:
    choice = asking.whole(CHAT, chat_body(max_tokens=2))["choices"][0]

    assert (choice["message"]["content"], choice["finish_reason"]) == ("one two", "length")


def test_an_answer_may_be_empty(asking: Asking) -> None:
    choice = asking.whole(CHAT, chat_body(""))["choices"][0]

    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


def test_the_choices_of_several_prompts_are_counted_through(asking: Asking) -> None:
    document = asking.whole(COMPLETIONS, completion_body(["one two", "three"], n=2))

    assert [(choice["index"], choice["text"]) for choice in document["choices"]] == [
        (0, "one two"),
        (1, "one two"),
        (2, "three"),
        (3, "three"),
    ]
    assert (document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]) == (3, 6)


def test_text_of_any_kind_comes_unchanged(asking: Asking) -> None:
    texts = ['quote" back\\slash', " \x00\x07\r\n\n\ndata: x", " é 漢字 🙂 </script> \u2028"]

    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield from pieces(submit, texts)

    asking.engine.script = script

    assert asking.whole(CHAT, chat_body())["choices"][0]["message"]["content"] == " ".join(texts)
    assert _text(asking.stream(COMPLETIONS, completion_body()), 0) == " ".join(texts)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_streamed_chat_says_who_speaks_then_what_then_why_it_ended(asking: Asking) -> None:
    documents = asking.stream(CHAT, chat_body())

    assert {document["object"] for document in documents} == {"chat.completion.chunk"}
    assert len({document["created"] for document in documents}) == 1
    assert all(set(document) == set(documents[0]) and "usage" not in document for document in documents)
    assert [document["choices"] for document in documents] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in [
            ({"role": "assistant", "content": ""}, None),
            ({"content": "one"}, None),
            ({"content": " two"}, None),
            ({"content": " three"}, None),
            ({}, "stop"),
        ]
    ]


def test_a_streamed_completion_ends_with_a_reason(asking: Asking) -> None:
    documents = asking.stream(COMPLETIONS, completion_body(max_tokens=2))

    assert {document["object"] for document in documents} == {"text_completion"}
    assert [document["choices"] for document in documents] == [
        [{"index": 0, "text": "one", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": " two", "logprobs": None, "finish_reason": "length"}],
    ]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_comes_last_and_is_null_before(asking: Asking, path: str) -> None:
    documents = asking.stream(path, body_for(path, stream_options={"include_usage": True}))

    assert [document["usage"] for document in documents[:-1]] == [None] * (len(documents) - 1)
    assert (documents[-1]["choices"], documents[-1]["usage"]) == ([], _USAGE)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_several_answers_of_a_stream_have_their_index(asking: Asking, path: str) -> None:
    documents = asking.stream(path, body_for(path, n=3))

    for index in range(3):
        assert _text(documents, index) == "one two three"
        assert _reasons(documents, index) == ["stop"]


def test_several_prompts_are_streamed_together(asking: Asking) -> None:
    prompts = ["one two", "three", "four five six"]

    documents = asking.stream(COMPLETIONS, completion_body(prompts, n=2, stream_options={"include_usage": True}))

    assert [_text(documents, choice) for choice in range(6)] == [prompt for prompt in prompts for _ in range(2)]
    assert documents[-1]["usage"]["prompt_tokens"] == 6


def test_a_piece_without_text_makes_no_event(asking: Asking) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield said(submit, "")
        yield said(submit, "é")
        yield said(submit, "", completion=ending("stop", 3))

    asking.engine.script = script

    assert [one["choices"][0]["delta"] for one in asking.stream(CHAT, chat_body())] == [
        {"role": "assistant", "content": ""},
        {"content": "é"},
        {},
    ]
    assert [one["choices"][0]["text"] for one in asking.stream(COMPLETIONS, completion_body())] == ["é", ""]


# --- usage ------------------------------------------------------------------------------------------------------------


def test_cached_tokens_are_told_by_tier(asking: Asking) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield from pieces(submit, ["x"], cached={"device": 1, "server": 2})

    asking.engine.script = script

    usage = asking.whole(CHAT, chat_body("a b c d"))["usage"]

    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 3,
        "cached_tokens_by_tier": {"device": 1, "server": 2},
    }


def test_cached_tokens_are_those_of_each_prompts_first_answer_and_no_more_than_there_are(asking: Asking) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        ends = [ending("stop", 1, cached={"device": 2 + 5 * index, "server": 4}) for index in range(submit.params.n)]
        ends = [dataclasses.replace(end, index=index) for index, end in enumerate(ends)]
        yield StepOutputs([(submit.number, StreamPiece(end.index, [1], "x", None, end)) for end in ends])

    asking.engine.script = script

    usage = asking.whole(COMPLETIONS, completion_body(["a b c", "a b c d e f g"], n=2))["usage"]

    assert usage["prompt_tokens"] == 10
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 3 + 6,
        "cached_tokens_by_tier": {"device": 4, "server": 1 + 4},
    }


# --- logprobs ---------------------------------------------------------------------------------------------------------


def test_a_chats_logprobs_are_told_per_token(asking: Asking) -> None:
    expected = [
        {
            "token": text,
            "bytes": list(text.encode()),
            "logprob": -0.5,
            "top_logprobs": [
                {"token": text, "bytes": list(text.encode()), "logprob": -0.5},
                {"token": text + "1", "bytes": list(f"{text}1".encode()), "logprob": -1.5},
            ],
        }
        for text in ("one", " two", " three")
    ]
    body = chat_body(logprobs=True, top_logprobs=2)

    assert asking.whole(CHAT, body)["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    streamed = [one["choices"][0]["logprobs"] for one in asking.stream(CHAT, body)]
    assert streamed == [None, *({"content": [token], "refusal": None} for token in expected), None]


def test_a_completions_logprobs_have_the_older_shape(asking: Asking) -> None:
    body = completion_body(logprobs=1)

    whole = asking.whole(COMPLETIONS, body)["choices"][0]["logprobs"]

    assert whole == {
        "tokens": ["one", " two", " three"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"one": -0.5}, {" two": -0.5}, {" three": -0.5}],
        "text_offset": [0, 3, 7],
    }
    streamed = [one["choices"][0]["logprobs"] for one in asking.stream(COMPLETIONS, body)]
    assert [offset for one in streamed for offset in one["text_offset"]] == [0, 3, 7]


def test_a_character_of_several_tokens_counts_once_in_a_completions_offsets(asking: Asking) -> None:
    tokens = [b"\xc3", b"\xa9", "\U0001f600".encode(), b"x"]

    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        logprobs = [{token: -0.5} for token in tokens]
        yield outputs(submit, "\u00e9\U0001f600x", tokens, logprobs, ending("length", len(tokens)))

    asking.engine.script = script

    shaped = asking.whole(COMPLETIONS, completion_body(logprobs=0))["choices"][0]["logprobs"]

    assert shaped["text_offset"] == [0, 0, 1, 2]


def test_a_token_that_cannot_come_has_a_logprob_that_json_can_say(asking: Asking) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        never = b"\xf0\x9f"
        yield outputs(submit, "", [never], [{never: float("-inf")}], ending("length", 1))

    asking.engine.script = script

    token = asking.whole(CHAT, chat_body(logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"][0]

    assert (token["token"], token["bytes"], token["logprob"]) == ("�", [0xF0, 0x9F], -9999.0)


def test_the_likeliest_tokens_come_first_and_only_as_many_as_asked_for(asking: Asking) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield outputs(submit, "x", [b"x"], [{b"w": -3.0, b"x": -2.0, "ü".encode(): -1.0}], ending("length", 1))

    asking.engine.script = script

    token = asking.whole(CHAT, chat_body(logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"][0]

    assert (token["token"], token["logprob"]) == ("x", -2.0)
    assert [one["bytes"] for one in token["top_logprobs"]] == [list("ü".encode()), list(b"x")]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reason", "status"), [("abort", 503), ("error", 500)])
def test_an_answer_that_the_engine_broke_off_is_an_error(asking: Asking, reason: str, status: int) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield said(submit, "x", completion=ending(reason, 1))

    asking.engine.script = script

    response = asking.status(CHAT, chat_body())
    assert (response.status_code, error_of(response)["type"]) == (status, "server_error")
    assert reason not in asking.status(CHAT, chat_body(stream=True)).text.partition('"error":{')[0]


def test_an_answer_that_its_grammar_does_not_let_continue_is_an_error_of_the_request(asking: Asking) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield said(submit, "x", completion=ending("dead_end", 1))

    asking.engine.script = script
    body = chat_body(guided_regex="x+")

    response = asking.status(CHAT, body)
    streamed = asking.status(CHAT, {**body, "stream": True}).text
    assert response.status_code == 400
    assert error_of(response) == {
        "message": DEAD_END,
        "type": "invalid_request_error",
        "param": "guided_regex",
        "code": "invalid_value",
    }
    assert json.loads(streamed.strip().rpartition("data: ")[2]) == response.json()


def _text(documents: list[Document], choice: int) -> str:
    choices = [one for document in documents for one in document["choices"] if one["index"] == choice]
    return "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in choices)


def _reasons(documents: list[Document], choice: int) -> list[str]:
    choices = [one for document in documents for one in document["choices"] if one["index"] == choice]
    return [one["finish_reason"] for one in choices if one["finish_reason"] is not None]
