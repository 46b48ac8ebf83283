"""Where prompts part, through a real deployment: in usage, by `kvtier explain`, and only for the tenant itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from kvtier.cli.main import main
from kvtier.testing.tiny_models import make_tiny_tokenizer
from tests.support.deployments import DeploymentProcess
from tests.support.openai_asking import CHAT, COMPLETIONS, documents_of
from tests.support.serving import client_of, save_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # a deployment, with engines

_OPEN, _QUIET = "open", "quiet"
_ONE, _OTHER = "key-of-one", "key-of-another"
_METRICS_KEY = "key-of-prometheus"
_TEXT = """\
models:
  - model: open
    kv_cache_space: 16MiB
    always_load: true
    explain_text: true
  - model: quiet              # tells no text, and its template stamps
    kv_cache_space: 16MiB
    cache: false
cache:
  memory: 32MiB
"""
_KEYS = [
    {"name": "one", "key": _ONE},
    {"name": "another", "key": _OTHER},
    {"name": "prometheus", "key": _METRICS_KEY, "metrics": True},
]
_STAMP = "It is {{ strftime_now('%H:%M:%S.%f') }}.\n"

Document = dict[str, Any]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentProcess]:
    folder = tmp_path_factory.mktemp("parting")
    for name in (_OPEN, _QUIET):
        save_model(folder / name)
    stamping = make_tiny_tokenizer()
    stamping.chat_template = _STAMP + str(stamping.chat_template)
    stamping.save_pretrained(folder / _QUIET)
    with DeploymentProcess(folder, _TEXT, http={"api_keys": _KEYS}) as running:
        yield running


def post(deployment: DeploymentProcess, path: str, body: Document, key: str = _ONE) -> httpx.Response:
    with client_of(deployment, key=key) as client:
        response = client.post(path, json={"temperature": 0, "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    return response


def chat(
    deployment: DeploymentProcess, contents: Sequence[str], *, key: str = _ONE, model: str = _OPEN, **fields: object
) -> tuple[Document, str, str]:
    """Where the prompt parted, the answer's text, and the request's id."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    response = post(deployment, CHAT, {"model": model, "messages": messages, "explain": True, **fields}, key)
    document = response.json()
    details = document["usage"]["prompt_tokens_details"]
    return details["parted"], document["choices"][0]["message"]["content"], response.headers["x-request-id"]


def explain(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


def socket_of(deployment: DeploymentProcess, name: str) -> str:
    [path] = deployment.runtime_parent.rglob(f"{name}.sock")
    return f"unix:{path}"


# --- in usage -------------------------------------------------------------------------------------------------------


def test_a_session_is_told_where_each_of_its_prompts_parts(deployment: DeploymentProcess) -> None:
    first, answer, _ = chat(deployment, ["Hello there, the first"], prompt_cache_key="walk")
    again, _, _ = chat(deployment, ["Hello there, the first"], prompt_cache_key="walk")
    edited, _, _ = chat(deployment, ["Hello there, the first", "No answer of yours", "On"], prompt_cache_key="walk")

    assert (first["how"], first["token"]) == ("nothing_recorded", 0)
    assert (again["how"], again["token"], again["same_session"]) == ("repeated", again["prompt_tokens"], True)
    assert (edited["how"], edited["message"], edited["role"]) == ("parted", 2, "assistant")
    assert edited["token"] >= first["prompt_tokens"]
    assert edited["in_answer"]
    assert edited["now"].startswith("No")
    assert not answer.startswith("No")
    assert "message 2 (assistant)" in edited["sentence"]


def test_a_longer_history_is_a_continuation(deployment: DeploymentProcess) -> None:
    contents = ["One walks", "Two walk", "Three walk"]
    chat(deployment, contents[:1], prompt_cache_key="longer", max_tokens=1)
    found, _, _ = chat(deployment, contents, prompt_cache_key="longer")

    assert found["token"] >= len("<|role|>user\nOne walks")  # a token per character, but for the two special ones
    assert found["same_session"]


def test_a_head_that_changes_each_time_is_advised_against(deployment: DeploymentProcess) -> None:
    found = [
        chat(deployment, [f"It is 2026-11-18 10:17:0{number}. Be kind."], prompt_cache_key="clock")[0]
        for number in range(4)
    ]

    assert [one.get("each_time", False) for one in found] == [False, False, True, True]
    assert found[-1]["causes"] == ["date"]
    assert any("date or time" in sentence for sentence in found[-1]["advice"])


def test_streams_and_completions_tell_it_too(deployment: DeploymentProcess) -> None:
    fields = {"model": _OPEN, "explain": True, "prompt_cache_key": "stream"}
    post(deployment, COMPLETIONS, {**fields, "prompt": "A sky is blue and wide."})
    response = post(
        deployment,
        COMPLETIONS,
        {**fields, "prompt": "A sky was blue.", "stream": True, "stream_options": {"include_usage": True}},
    )

    parted = documents_of(response.text)[-1]["usage"]["prompt_tokens_details"]["parted"]
    assert (parted["how"], parted["token"]) == ("parted", len("A sky "))
    assert (parted["recorded"][:2], parted["now"][:3]) == ("is", "was")


def test_responses_and_messages_tell_it_in_their_own_usage(deployment: DeploymentProcess) -> None:
    def respond(text: str) -> Document:
        fields = {"model": _OPEN, "input": text, "max_output_tokens": 4, "explain": True, "prompt_cache_key": "items"}
        with client_of(deployment, key=_ONE) as client:
            response = client.post("/v1/responses", json=fields)
        assert response.status_code == 200, response.text
        found: Document = response.json()["usage"]["input_tokens_details"]["parted"]
        return found

    def write(text: str) -> Document:
        messages = [{"role": "user", "content": text}]
        fields = {"model": _OPEN, "messages": messages, "explain": True, "metadata": {"user_id": "blocks"}}
        found: Document = post(deployment, "/v1/messages", fields).json()["usage"]["parted"]
        return found

    for ask in (respond, write):
        ask("The river is long, and slow.")
        parted = ask("The river was short.")
        assert (parted["how"], parted["message"], parted["same_session"]) == ("parted", 1, True)
        assert (parted["recorded"][:2], parted["now"][:3]) == ("is", "was")


def test_a_large_body_is_compared_as_a_small_one_is(deployment: DeploymentProcess) -> None:
    fields = {"model": _OPEN, "explain": True, "prompt_cache_key": "large"}
    tokens = [number % 250 for number in range(4_000)]
    padding = {"metadata": {str(number): "x" * 500 for number in range(64)}}
    post(deployment, COMPLETIONS, {**fields, **padding, "prompt": tokens})
    response = post(deployment, COMPLETIONS, {**fields, **padding, "prompt": [*tokens[:3_500], 1, 2, 3]})

    parted = response.json()["usage"]["prompt_tokens_details"]["parted"]
    assert (parted["how"], parted["token"], parted["same_session"]) == ("parted", 3_500, True)


def test_nothing_is_told_unless_it_is_asked_for(deployment: DeploymentProcess) -> None:
    document = post(deployment, COMPLETIONS, {"model": _OPEN, "prompt": "The sky", "prompt_cache_key": "s"}).json()

    assert set(document["usage"]["prompt_tokens_details"]) == {"cached_tokens", "cached_tokens_by_tier"}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"explain": 1}, "explain"),
        ({"explain": True, "prompt": ["a", "b"]}, "explain needs a single prompt, not 2"),
        ({"explain": True, "stream": True}, "explain needs stream_options.include_usage in a stream"),
        ({"prompt_cache_key": "x" * 1025}, "prompt_cache_key"),
    ],
)
def test_what_cannot_be_told_is_refused(deployment: DeploymentProcess, fields: Document, sentence: str) -> None:
    with client_of(deployment, key=_ONE) as client:
        response = client.post(COMPLETIONS, json={"model": _OPEN, "prompt": "a", **fields})

    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


# --- tenants and text -------------------------------------------------------------------------------------------------


def test_a_tenant_learns_nothing_of_anothers_prompts(deployment: DeploymentProcess) -> None:
    contents = ["A secret of the first tenant: sesame"]
    chat(deployment, contents, prompt_cache_key="secret")
    chat(deployment, contents)

    named, _, _ = chat(deployment, ["A secret of the first tenant: open"], key=_OTHER, prompt_cache_key="secret")
    nameless, _, _ = chat(deployment, contents, key=_OTHER)

    assert (named["how"], named["token"]) == ("nothing_recorded", 0)
    assert nameless["token"] < nameless["prompt_tokens"]
    assert "sesame" not in json.dumps(named)
    assert nameless["recorded"].startswith("open")


def test_a_deployment_that_allows_no_text_tells_none(deployment: DeploymentProcess) -> None:
    fields = {"model": _QUIET, "explain": True, "prompt_cache_key": "quiet"}
    post(deployment, COMPLETIONS, {**fields, "prompt": "A sesame is blue"})
    found = post(deployment, COMPLETIONS, {**fields, "prompt": "A sesame was blue"}).json()

    parted = found["usage"]["prompt_tokens_details"]["parted"]
    assert (parted["how"], parted["token"]) == ("parted", len("A sesame "))
    assert not {"before", "recorded", "now"} & set(parted)
    assert "sesame" not in json.dumps(parted)


def test_a_template_that_stamps_is_named_at_the_start_and_for_each_prompt(deployment: DeploymentProcess) -> None:
    deployment.wait_for_log("the chat template of quiet writes the current date")
    assert "the chat template of open" not in deployment.log()
    chat(deployment, ["Hello"], model=_QUIET, prompt_cache_key="stamped")

    found, _, _ = chat(deployment, ["Hello"], model=_QUIET, prompt_cache_key="stamped")

    assert found["how"] == "parted"
    assert found["causes"] == ["template_date", "date"]
    assert any("chat template writes the current date" in sentence for sentence in found["advice"])


# --- by the command -------------------------------------------------------------------------------------------------


def test_the_command_tells_message_text_and_advice(deployment: DeploymentProcess) -> None:
    server = socket_of(deployment, "cache")
    chat(deployment, ["It is 10:17:01 now"], prompt_cache_key="command")
    parted, _, request_id = chat(deployment, ["It is 10:17:02 now"], prompt_cache_key="command")
    wait_until(lambda: explain("--server", server, request_id).exit_code == 0)

    shown = explain("--server", server, request_id).output
    document = json.loads(explain("--server", server, request_id, "--json").output)

    assert parted["sentence"] in shown
    assert "message 1 (user): cached '1 now" in shown
    assert "A date or time changes" in shown
    assert document["parting"]["token"] == parted["token"]
    assert (document["parting"]["message"], document["parting"]["now"][:5]) == (1, "2 now")


def test_an_engine_without_a_cache_server_is_asked_itself(deployment: DeploymentProcess) -> None:
    engine = socket_of(deployment, _QUIET)
    fields = {"model": _QUIET, "prompt_cache_key": "itself"}
    post(deployment, COMPLETIONS, {**fields, "prompt": "A sesame is blue"})
    request_id = post(deployment, COMPLETIONS, {**fields, "prompt": "A sesame was blue"}).headers["x-request-id"]

    text, document = explain("--engine", engine, request_id), explain("--engine", engine, request_id, "--json")

    assert text.output == "The prompt parts from an earlier prompt of its session at token 9.\n"
    assert json.loads(document.output)["token"] == 9
    unknown = explain("--engine", engine, "no-such-id")
    assert (unknown.exit_code, "does not know request no-such-id" in unknown.output) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--engine", "unix:/no/such/socket", "id"), 1, "no engine answers at unix:/no/such/socket: No such file"),
        (("--engine", "tcp://host:1", "id"), 1, "an engine has a Unix socket"),
        (("--engine", "unix:/no/such/socket"), 2, "Give the id of a request"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(arguments: tuple[str, ...], code: int, sentence: str) -> None:
    result = explain(*arguments)

    assert (result.exit_code, sentence in result.output) == (code, True), result.output


def test_heads_that_part_are_counted(deployment: DeploymentProcess) -> None:
    for number in range(3):
        chat(deployment, [f"It is 10:17:0{number} again"], prompt_cache_key="counted")
    with client_of(deployment, key=_METRICS_KEY) as client:
        lines = client.get("/metrics").text.splitlines()

    assert any(line.startswith("kvtier_engine_parted_heads_total") and 'cause="date"' in line for line in lines)
    assert any(line.startswith("kvtier_engine_compared_prompts_total") and 'how="parted"' in line for line in lines)


# --- stable prefixes ------------------------------------------------------------------------------------------------


def test_nothing_of_ours_changes_the_beginning_of_a_history_that_grows(deployment: DeploymentProcess) -> None:
    """The same conversation twice, and as it grows: every prompt begins with all of the one before."""
    contents = ["First I ask", "then you answer", "then I ask more", "and you answer", "and so on"]
    for session in ("grows", "grows again"):
        before = 0
        for count in (1, 3, 5):
            found, _, _ = chat(deployment, contents[:count], prompt_cache_key=session, max_tokens=1)
            if count > 1:
                assert found["token"] >= before, found
                assert found["in_answer"] or found["how"] == "continued"
            before = found["prompt_tokens"]


def test_the_runtime_folder_has_the_sockets_that_are_asked(deployment: DeploymentProcess) -> None:
    assert Path(socket_of(deployment, _OPEN).removeprefix("unix:")).is_socket()


def test_explain_finds_the_engine_that_has_no_cache_server(
    deployment: DeploymentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, request_id = chat(deployment, ["Who knows me?"], model=_QUIET)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deployment.runtime_parent))
    monkeypatch.setattr(tempfile, "tempdir", str(deployment.runtime_parent))
    monkeypatch.setattr("kvtier.cli.connection_options.default_socket", lambda: f"{deployment.folder}/none.sock")

    found, unknown = explain(request_id), explain("nobody")

    assert (found.exit_code, unknown.exit_code) == (0, 1), found.output
    assert "recorded" in found.output
    assert "has no note of request nobody" in unknown.output
