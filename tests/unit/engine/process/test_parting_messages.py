"""What an engine's socket says of where prompts part, and that prompts are answered whatever comes of it."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.engine.client import Admitted, PieceSink, Submission
from kvtier.engine.parting.partings import AskedPrompt, Partings
from kvtier.engine.process.asking import ask_parting
from kvtier.engine.process.messages import (
    LENGTH_BYTES,
    ChatMessage,
    ChatPrompt,
    EngineHello,
    Submit,
    TextPrompt,
    ToolCall,
    decode_request,
    encode,
)
from kvtier.engine.process.prompt_making import tokens_of
from kvtier.engine.process.server import EngineServer
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import EngineAway
from kvtier.models.prompt_encoder import PromptEncoder
from kvtier.models.tokenizer import Tokenizer
from kvtier.testing.tiny_models import make_tiny_tokenizer
from kvtier.tiers.parting import Cause, How, Parting
from tests.support.waiting import LIMIT_S, wait_until

_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|role|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)
_TOOLS: list[dict[str, object]] = [
    {"type": "function", "function": {"name": "zip", "parameters": {"b": {"type": "string"}, "a": {}}}},
    {"function": {"name": "add"}, "type": "function"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = make_tiny_tokenizer()
    inner.chat_template = _TEMPLATE
    inner.save_pretrained(folder)
    return Tokenizer(folder)


class _AcceptingClient:
    """Takes every prompt in, and answers none."""

    def __init__(self) -> None:
        self.submitted: list[str] = []

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        salt: str,
        client: str,
        warms: bool,
        sink: PieceSink,
    ) -> Submission:
        self.submitted.append(request_id)
        sink.put([(request_id, Admitted(len(prompt)))])
        return Submission(request_id, lambda submission: None)


class _FailingPartings(Partings):
    def compare(self, asked: AskedPrompt) -> Parting | None:
        raise ZeroDivisionError("a comparison that fails")


_HELLO = EngineHello(
    **dict.fromkeys(("engine", "model", "architecture", "dtype", "quantization", "device", "namespace"), ""),
    **dict.fromkeys(("weights_bytes", "num_parameters", "vocab_size", "max_model_len", "block_tokens"), 1),
    num_blocks=1,
    kv_bytes=1,
    has_tokenizer=True,
    chat_template="",
    started_at=1.0,
)


@contextlib.contextmanager
def serving(folder: Path, tokenizer: Tokenizer, partings: Partings) -> Iterator[tuple[EngineServer, _AcceptingClient]]:
    client = _AcceptingClient()
    prompts = PromptEncoder(tokenizer, 4096, 320)
    server = EngineServer(client, prompts, _HELLO, str(folder / "e.sock"), (), partings)  # type: ignore[arg-type]
    with contextlib.closing(server):
        yield server, client


def submit(folder: Path, *requests: Submit) -> contextlib.AbstractContextManager[object]:
    """Sends them; the connection is open within the scope."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(LIMIT_S)
    sock.connect(str(folder / "e.sock"))
    sock.sendall(b"".join(map(encode, requests)))
    return contextlib.closing(sock)


# --- over the socket ------------------------------------------------------------------------------------------------


def test_a_program_asks_where_a_prompt_parted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompts = [
        ChatPrompt([ChatMessage("user", "One"), ChatMessage("assistant", word)], {}, tools)
        for word, tools in (("It is 10:17:01", _TOOLS), ("It is 10:17:02", _TOOLS))
    ]
    requests = [
        Submit(number, f"request-{number}", prompt, SamplingParams(), session="s")
        for number, prompt in enumerate(prompts)
    ]
    with serving(tmp_path, tokenizer, Partings(tokenizer, shows_text=True)) as (server, client):
        for request in requests:
            with submit(tmp_path, request):
                wait_until(lambda request=request: request.request_id in client.submitted)
        found = ask_parting(str(tmp_path / "e.sock"), "request-1", LIMIT_S)
        unknown = ask_parting(str(tmp_path / "e.sock"), "request-9", LIMIT_S)

        assert server.partings.asked_at == f"unix:{tmp_path / 'e.sock'}"
    assert unknown is None
    assert found is not None
    assert (found.how, found.message, found.role, found.causes) == (How.PARTED, 2, "assistant", [Cause.DATE])
    assert (found.recorded[0], found.now[0]) == ("1", "2")


def test_a_prompt_is_answered_although_it_cannot_be_compared(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with serving(tmp_path, tokenizer, _FailingPartings(tokenizer)) as (_, client):
        request = Submit(1, "one", TextPrompt("Hello"), SamplingParams(), explains=True)
        with submit(tmp_path, request):
            wait_until(lambda: client.submitted == ["one"])
        assert ask_parting(str(tmp_path / "e.sock"), "one", LIMIT_S) is None


def test_an_engine_that_is_gone_is_said_to_be_away(tmp_path: Path) -> None:
    with pytest.raises(EngineAway, match=r"no engine answers at unix:.*: No such file or directory"):
        ask_parting(str(tmp_path / "e.sock"), "one", 1.0)


# --- rendering keeps prefixes stable ----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=8)), min_size=1, max_size=5),
    st.booleans(),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_history_that_grows_begins_with_the_tokens_it_began_with(
    tokenizer: Tokenizer, messages: list[tuple[str, str]], has_tools: bool
) -> None:
    """On its way through the socket's messages, twice: nothing is reordered, nothing is stamped."""
    encoder = PromptEncoder(tokenizer, 100_000, 320)
    call = ToolCall("add", {"z": 1, "a": {"y": 2, "b": 3}}, "call-1")

    def tokens_until(count: int) -> list[int]:
        chat = [ChatMessage(role, text, tool_calls=[call] if role == "assistant" else []) for role, text in messages]
        prompt = ChatPrompt(chat[:count], {}, _TOOLS if has_tools else [])
        sent = decode_request(encode(Submit(1, "one", prompt, SamplingParams()))[LENGTH_BYTES:])
        assert isinstance(sent, Submit)
        return tokens_of(encoder, sent.prompt)

    asks_for_answer = tokenizer.encode("<|role|>assistant\n", add_special_tokens=False)
    found = [tokens_until(count + 1) for count in range(len(messages))]
    assert found == [tokens_until(count + 1) for count in range(len(messages))]
    for shorter, longer in itertools.pairwise(found):
        history = shorter[: -len(asks_for_answer)]
        assert shorter[-len(asks_for_answer) :] == asks_for_answer
        assert longer[: len(history)] == history


def test_tools_and_their_keys_stay_in_the_clients_order(tokenizer: Tokenizer) -> None:
    encoder = PromptEncoder(tokenizer, 100_000, 320)
    prompt = ChatPrompt([ChatMessage("user", "Hi")], {}, _TOOLS)
    sent = decode_request(encode(Submit(1, "one", prompt, SamplingParams()))[LENGTH_BYTES:])
    assert isinstance(sent, Submit)

    text = tokenizer.decode(tokens_of(encoder, sent.prompt), skip_special_tokens=False)

    assert text.index('"zip"') < text.index('"add"')
    assert text.index('"b"') < text.index('"a"')
    assert text.index('"type": "function", "function": {"name": "zip"') < text.index('{"function": {"name": "add"}')
