"""An engine's socket over an engine that only pretends: what is asked reaches it, and what it says those who asked."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, Counter

from kvtier.engine.answer import Completion, StreamPiece
from kvtier.engine.client import Admitted, EngineClient, PieceSink, StreamEvent, Submission
from kvtier.engine.grammar import Grammar
from kvtier.engine.process.messages import (
    FAILED,
    INVALID,
    LENGTH_BYTES,
    MAX_PROMPT_END_CHARACTERS,
    STOPPED,
    TOO_LONG,
    Abort,
    Accepted,
    AskMetrics,
    ChatMessage,
    ChatPrompt,
    EngineHello,
    FromEngine,
    Metrics,
    Prompt,
    Refused,
    StepOutputs,
    Submit,
    TextPrompt,
    ToEngine,
    Tokenize,
    Tokenized,
    TokenPrompt,
    body_length,
    decode_reply,
    encode,
)
from kvtier.engine.process.server import EngineServer
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import EngineStopped, InvalidParameter, PromptTooLong
from kvtier.models.prompt_encoder import EncodedChat, PromptEncoder
from tests.support.waiting import LIMIT_S, wait_until

_HELLO = EngineHello(
    engine="engine-0",
    model="tiny",
    architecture="LlamaForCausalLM",
    dtype="float32",
    quantization="",
    weights_bytes=1,
    num_parameters=1,
    vocab_size=512,
    max_model_len=1000,
    block_tokens=16,
    num_blocks=64,
    kv_bytes=1,
    device="cpu",
    namespace="00",
    has_tokenizer=True,
    chat_template="",
    started_at=1.0,
)
_UNREAD = 4 << 20
"""Bytes that fit into no socket's buffer."""


class _FakeClient:
    """Keeps what was submitted and aborted; a test says what comes of it with `say`, as the engine's thread would."""

    loading_off = ""
    was_told = False

    def __init__(self) -> None:
        self.prompts: dict[str, tuple[list[int], SamplingParams, str]] = {}
        self.aborted: list[str] = []
        self.failure: Exception | None = None
        self._sinks: dict[str, PieceSink] = {}

    def has_compiled(self, grammar: Grammar) -> bool:
        return False

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
        if self.failure is not None:
            raise self.failure
        self._sinks[request_id] = sink
        self.prompts[request_id] = (prompt, params, salt)
        return Submission(request_id, lambda submission: self.aborted.append(submission.request_id))

    def say(self, request_id: str, *news: StreamEvent) -> None:
        self._sinks[request_id].put([(request_id, one) for one in news])


class _Texts:
    """A token per character; nothing is made of text, and no text of tokens, while `hold` is clear."""

    def __init__(self) -> None:
        self.num_shown = 0
        self.hold = threading.Event()
        self.hold.set()
        self.hold_long = threading.Event()
        self.hold_long.set()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert self.hold.wait(LIMIT_S)
        assert len(text) == 1 or self.hold_long.wait(LIMIT_S)
        return [1] * add_special_tokens + [ord(character) for character in text]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        template_values: Mapping[str, object],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> EncodedChat:
        if template_values.get("breaks"):
            raise ZeroDivisionError("a template divides by zero")
        if template_values.get("refuses"):
            raise InvalidParameter("the model has no tokenizer: give a prompt of token ids")
        text = "".join(f"{one['role']}{one['content']}" for one in messages)
        return EncodedChat(text, self.encode(text, add_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        self.num_shown += 1
        assert self.hold.wait(LIMIT_S)
        return chr(token_id).encode()


class _Peer:
    """Whoever asks: a socket and the messages on it. The first one, `hello`, was read."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(LIMIT_S)
        self.sock.connect(str(path))
        self.hello = self.receive()

    def send(self, *requests: ToEngine) -> None:
        self.sock.sendall(b"".join(map(encode, requests)))

    def receive(self) -> FromEngine:
        reply = self.receive_or_end()
        assert reply is not None, "the connection ended"
        return reply

    def receive_or_end(self) -> FromEngine | None:
        head = self._receive(LENGTH_BYTES)
        return None if head is None else decode_reply(self._receive(body_length(head)) or b"")

    def has_ended(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return self.receive_or_end() is None
        return True

    def close(self) -> None:
        self.sock.close()

    def _receive(self, nbytes: int) -> bytes | None:
        data = b""
        while len(data) < nbytes:
            more = self.sock.recv(nbytes - len(data))
            if not more:
                return None
            data += more
        return data


class _Bench:
    """The server and everything around it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.client = _FakeClient()
        self.texts = _Texts()
        self.registry = CollectorRegistry()
        self.server = EngineServer(
            cast(EngineClient, self.client),
            cast(PromptEncoder, self.texts),
            _HELLO,
            str(path),
            registries=[self.registry],
        )
        self._peers: list[_Peer] = []
        self._is_closed = False
        self._numbers = itertools.count(1)

    def connect(self) -> _Peer:
        self._peers.append(_Peer(self.path))
        return self._peers[-1]

    def submitted(self, peer: _Peer, *request_ids: str, params: SamplingParams | None = None) -> None:
        """Prompts that the engine has; their numbers count from 1, over all who ask."""
        for request_id in request_ids:
            peer.send(_submit(next(self._numbers), request_id, params=params))
        wait_until(lambda: all(request_id in self.client.prompts for request_id in request_ids))

    def close_server(self) -> None:
        """Once."""
        if not self._is_closed:
            self._is_closed = True
            self.server.close()

    def close(self) -> None:
        self.texts.hold.set()
        self.texts.hold_long.set()
        self.close_server()
        for peer in self._peers:
            peer.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[_Bench]:
    bench = _Bench(tmp_path / "e.sock")
    yield bench
    bench.close()


def _submit(
    number: int, request_id: str, prompt: Prompt | None = None, params: SamplingParams | None = None, salt: str = ""
) -> Submit:
    return Submit(number, request_id, prompt or TokenPrompt([5, 6]), params or SamplingParams(), salt)


def _piece(text: str, *, index: int = 0, reason: str | None = None, **fields: Any) -> StreamPiece:
    """With a `reason` it is the last one."""
    token_ids = [ord(character) for character in text]
    completion = None
    if reason is not None:
        completion = Completion(index, token_ids, text, reason, None, 0.25, 0.5, {"device": 16, "server": 0})
    return StreamPiece(index, token_ids, text, fields.get("logprobs"), completion)


# --- asking -----------------------------------------------------------------------------------------------------------


def test_it_says_what_runs_here_before_it_is_asked(bench: _Bench) -> None:
    assert not bench.server.wait_until_met(0.0)

    assert bench.connect().hello == _HELLO
    assert bench.server.wait_until_met(20)


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        (TokenPrompt([7, 8]), [7, 8]),
        (TextPrompt("ab"), [1, 97, 98]),
        (TextPrompt("ab", adds_special_tokens=False), [97, 98]),
        (ChatPrompt([ChatMessage("u", "a"), ChatMessage("s", "b")]), [117, 97, 115, 98]),
    ],
)
def test_every_kind_of_prompt_reaches_the_engine_as_tokens(bench: _Bench, prompt: Prompt, token_ids: list[int]) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0)
    bench.connect().send(_submit(1, "a", prompt, params, salt="of a tenant"))
    wait_until(lambda: bench.client.prompts)

    assert bench.client.prompts == {"a": (token_ids, params, "of a tenant")}


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        (TokenPrompt([7, 8]), [7, 8]),
        (TextPrompt("ab"), [1, 97, 98]),
        (ChatPrompt([ChatMessage("u", "a"), ChatMessage("s", "b")]), [117, 97, 115, 98]),
    ],
)
def test_the_tokens_of_a_prompt_come_back_and_the_engine_hears_nothing(
    bench: _Bench, prompt: Prompt, token_ids: list[int]
) -> None:
    peer = bench.connect()
    peer.send(Tokenize(7, prompt))

    assert peer.receive() == Tokenized(7, token_ids)
    assert not bench.client.prompts


def test_a_prompt_without_tokens_is_refused_under_its_number(bench: _Bench) -> None:
    peer = bench.connect()
    peer.send(Tokenize(7, ChatPrompt([ChatMessage("u", "a")], {"refuses": True})))
    assert peer.receive() == Refused(7, INVALID, "the model has no tokenizer: give a prompt of token ids")
    peer.send(Tokenize(8, ChatPrompt([ChatMessage("u", "a")], {"breaks": True})))
    assert peer.receive() == Refused(8, FAILED, "the prompt could not be made: a template divides by zero")
    bench.server.refuse()
    peer.send(Tokenize(9, TextPrompt("a")))
    assert peer.receive() == Refused(9, STOPPED, "the engine is stopping")


def test_who_asked_is_told_how_a_conversation_ends(bench: _Bench) -> None:
    peer = bench.connect()
    peer.send(_submit(1, "a", ChatPrompt([ChatMessage("u", "x" * 100 + "<think>\n")])))
    wait_until(lambda: bench.client.prompts)
    bench.client.say("a", Admitted(2))

    assert peer.receive() == Accepted(1, 2, "x" * (MAX_PROMPT_END_CHARACTERS - 8) + "<think>\n")


@pytest.mark.parametrize(
    ("end", "is_inside"), [("<think>", True), ("<think>\n", True), ("<think></think>", False), ("<think> so", False)]
)
def test_an_answer_that_begins_in_a_thought_has_a_grammar_of_its_own(bench: _Bench, end: str, is_inside: bool) -> None:
    outside, inside = Grammar("regex", "a"), Grammar("regex", "b")
    prompt = ChatPrompt([ChatMessage("u", end)], grammar_in_thought=inside)
    bench.connect().send(_submit(1, "a", prompt, SamplingParams(grammar=outside)))
    wait_until(lambda: bench.client.prompts)

    assert bench.client.prompts["a"][1].grammar == (inside if is_inside else outside)


def test_an_answer_comes_under_its_number_from_its_admission_to_its_end(bench: _Bench) -> None:
    peer = bench.connect()
    bench.submitted(peer, "a")
    bench.client.say("a", Admitted(2))
    assert peer.receive() == Accepted(1, 2)
    bench.client.say("a", _piece("x"))
    assert peer.receive() == StepOutputs([(1, StreamPiece(0, [120], "x"))])
    bench.client.say("a", _piece("y", reason="length"))

    last = peer.receive()

    assert isinstance(last, StepOutputs)
    [(number, piece)] = last.pieces
    assert (number, piece.text) == (1, "y")
    # Of the completion what no piece has brought.
    assert piece.completion == Completion(0, [ord("y")], "", "length", None, 0.25, 0.5, {"device": 16})


def test_several_answers_to_a_prompt_have_an_end_each(bench: _Bench) -> None:
    peer = bench.connect()
    bench.submitted(peer, "a", params=SamplingParams(n=2))
    bench.client.say("a", _piece("x", index=1, reason="stop"))
    bench.client.say("a", _piece("y", index=0), _piece("z", index=0, reason="length"))

    pieces = [*_pieces(peer, 3)]

    assert [(piece.index, piece.text, piece.completion is not None) for piece in pieces] == [
        (1, "x", True),
        (0, "y", False),
        (0, "z", True),
    ]


def _pieces(peer: _Peer, count: int) -> Iterator[StreamPiece]:
    while count > 0:
        outputs = peer.receive()
        assert isinstance(outputs, StepOutputs)
        count -= len(outputs.pieces)
        yield from (piece for _, piece in outputs.pieces)


def test_logprobs_come_with_the_bytes_of_all_their_tokens(bench: _Bench) -> None:
    peer = bench.connect()
    bench.submitted(peer, "a", params=SamplingParams(logprobs=3))
    logprobs = [{ord("w"): -3.0, ord("x"): -2.0, ord("ü"): -1.0}]
    bench.client.say("a", _piece("x", logprobs=logprobs))

    assert peer.receive() == StepOutputs(
        [(1, StreamPiece(0, [ord("x")], "x", logprobs))],
        {ord("w"): b"w", ord("x"): b"x", ord("ü"): "ü".encode()},
    )


def test_two_who_ask_hear_only_of_their_own(bench: _Bench) -> None:
    one, other = bench.connect(), bench.connect()
    bench.submitted(one, "a")
    bench.submitted(other, "b")
    bench.client.say("b", _piece("for the other"))
    bench.client.say("a", _piece("for the one"))

    assert [piece.text for peer in (one, other) for piece in _pieces(peer, 1)] == ["for the one", "for the other"]


def test_metrics_come_with_their_labels(bench: _Bench) -> None:
    Counter("kvtier_things", "Things.", ["tier"], registry=bench.registry).labels(tier="disk").inc(3)
    peer = bench.connect()
    peer.send(AskMetrics(9))

    reply = peer.receive()

    assert isinstance(reply, Metrics)
    assert reply.number == 9
    (family,) = reply.families
    assert (family.name, family.kind) == ("kvtier_things", "counter")
    assert ("kvtier_things_total", {"tier": "disk"}, 3.0) in [
        (one.name, one.labels, one.value) for one in family.samples
    ]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [(PromptTooLong("too long"), TOO_LONG), (InvalidParameter("n must be 1"), INVALID), (EngineStopped("no"), STOPPED)],
)
def test_a_prompt_that_the_engine_does_not_take_is_refused_for_that(
    bench: _Bench, error: Exception, reason: str
) -> None:
    peer = bench.connect()
    bench.submitted(peer, "a")
    bench.client.say("a", error)

    assert peer.receive() == Refused(1, reason, str(error))


def test_an_engine_that_has_stopped_refuses_at_once(bench: _Bench) -> None:
    bench.client.failure = EngineStopped("the engine has stopped: out of memory")
    peer = bench.connect()
    peer.send(_submit(1, "a"))

    assert peer.receive() == Refused(1, STOPPED, "the engine has stopped: out of memory")


def test_a_prompt_that_is_being_made_counts_until_its_answer_is_complete(bench: _Bench) -> None:
    """So that whoever stops the engine waits for it."""
    peer = bench.connect()
    bench.texts.hold.clear()
    peer.send(_submit(1, "a", TextPrompt("a")))
    wait_until(lambda: bench.server.num_prompts == 1)
    bench.server.refuse()
    peer.send(_submit(2, "b", TextPrompt("b")))
    assert peer.receive() == Refused(2, STOPPED, "the engine is stopping")
    assert bench.server.num_prompts == 1

    bench.texts.hold.set()
    wait_until(lambda: "a" in bench.client.prompts)
    bench.client.say("a", Admitted(1), _piece("x"))
    assert peer.receive() == Accepted(1, 1, "")
    assert len([*_pieces(peer, 1)]) == 1
    assert bench.server.num_prompts == 1

    bench.client.say("a", _piece("y", reason="stop"))
    assert len([*_pieces(peer, 1)]) == 1
    assert bench.server.num_prompts == 0


@pytest.mark.parametrize(
    ("value", "reason", "sentence"),
    [("refuses", INVALID, "has no tokenizer"), ("breaks", FAILED, "could not be made: a template divides by zero")],
)
def test_a_chat_that_makes_no_prompt_is_refused_and_the_next_one_is_served(
    bench: _Bench, value: str, reason: str, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", logger="kvtier")
    peer = bench.connect()
    peer.send(_submit(1, "a", ChatPrompt([ChatMessage("user", "hi")], {value: True})))

    refused = peer.receive()

    assert isinstance(refused, Refused)
    assert (refused.number, refused.reason) == (1, reason)
    assert sentence in refused.sentence
    bench.submitted(peer, "b")


def test_a_server_that_is_about_to_stop_takes_nothing_new_and_ends_what_it_has(bench: _Bench) -> None:
    peer = bench.connect()
    bench.submitted(peer, "a")
    bench.server.refuse()
    peer.send(_submit(2, "b"))

    assert peer.receive() == Refused(2, STOPPED, "the engine is stopping")
    bench.client.say("a", _piece("x", reason="stop"))
    assert [piece.text for piece in _pieces(peer, 1)] == ["x"]


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_an_abort_reaches_the_engine_once(bench: _Bench) -> None:
    peer = bench.connect()
    bench.submitted(peer, "a", "b")
    peer.send(Abort(1), Abort(1), Abort(77))
    bench.submitted(peer, "c")

    assert bench.client.aborted == ["a"]


def test_a_prompt_that_is_aborted_while_it_is_made_is_not_computed(bench: _Bench) -> None:
    bench.texts.hold.clear()
    peer = bench.connect()
    for number in range(51, 55):  # more than there are threads to make prompts: some have not begun
        peer.send(_submit(number, f"{number}", TextPrompt("a")))
    for number in range(51, 55):
        peer.send(Abort(number))
    peer.send(AskMetrics(99))
    assert isinstance(peer.receive(), Metrics)  # the aborts were read
    bench.texts.hold.set()

    bench.submitted(peer, "later")

    wait_until(lambda: set(bench.client.prompts) - {"later"} == set(bench.client.aborted))
    assert len(bench.client.aborted) <= 2


def test_an_end_that_was_said_already_makes_an_abort_a_word_about_nothing(bench: _Bench) -> None:
    peer = bench.connect()
    bench.submitted(peer, "a")
    bench.client.say("a", _piece("x", reason="stop"))
    list(_pieces(peer, 1))
    peer.send(Abort(1))
    bench.submitted(peer, "b")

    assert bench.client.aborted == []


def test_a_disconnect_aborts_everything_that_was_asked_over_it(bench: _Bench) -> None:
    one, other = bench.connect(), bench.connect()
    bench.submitted(one, "a", "b")
    bench.submitted(other, "c")
    bench.client.say("b", _piece("x", reason="stop"))
    list(_pieces(one, 1))

    one.close()

    wait_until(lambda: bench.client.aborted)
    assert bench.client.aborted == ["a"]
    bench.client.say("a", _piece("for nobody", reason="abort"))
    bench.client.say("c", _piece("x"))
    assert [piece.text for piece in _pieces(other, 1)] == ["x"]


def test_a_disconnect_while_a_prompt_is_made_aborts_it_too(bench: _Bench) -> None:
    bench.texts.hold.clear()
    peer = bench.connect()
    peer.send(_submit(1, "a", TextPrompt("a")), AskMetrics(2))
    peer.receive()
    peer.close()
    bench.texts.hold.set()

    wait_until(lambda: set(bench.client.prompts) == set(bench.client.aborted))


# --- what is not ours -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<I", 0),
        struct.pack("<I", 0xFFFF_FFFF),
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        encode(AskMetrics(1)).replace(b"ask_metrics", b"bsk_metrics"),
        encode(_HELLO),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100),
    ],
    ids=["empty", "huge", "no msgpack", "unknown kind", "a reply", "http"],
)
def test_garbage_ends_its_connection_and_no_other(
    bench: _Bench, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", logger="kvtier")
    peer, other = bench.connect(), bench.connect()
    bench.submitted(peer, "a")
    peer.sock.sendall(garbage)

    assert peer.has_ended()
    wait_until(lambda: bench.client.aborted == ["a"])
    bench.submitted(other, "b")
    assert bench.connect().hello == _HELLO


def test_half_a_message_and_an_end_is_a_disconnect(bench: _Bench) -> None:
    peer = bench.connect()
    bench.submitted(peer, "a")
    peer.sock.sendall(encode(_submit(2, "b"))[:-1])
    peer.close()

    wait_until(lambda: bench.client.aborted == ["a"])
    assert set(bench.client.prompts) == {"a"}


# --- closing ----------------------------------------------------------------------------------------------------------


def test_what_was_said_before_the_end_is_sent(bench: _Bench) -> None:
    """Also when it waits with the end in one queue: an answer that is complete is not lost."""
    peer = bench.connect()
    bench.submitted(peer, "a", params=SamplingParams(logprobs=1))
    bench.texts.hold.clear()
    bench.client.say("a", _piece("x", logprobs=[{ord("x"): -1.0}]))
    wait_until(lambda: bench.texts.num_shown)  # whoever writes is busy with it
    bench.client.say("a", _piece("y", reason="stop"))
    closing = threading.Thread(target=bench.close_server)
    closing.start()
    wait_until(lambda: bench.client.aborted)  # nothing more is read
    bench.texts.hold.set()
    closing.join()

    assert "".join(piece.text for piece in _pieces(peer, 2)) == "xy"
    assert peer.has_ended()


def test_closing_removes_the_socket_and_aborts_what_is_under_way(bench: _Bench) -> None:
    peer = bench.connect()
    bench.submitted(peer, "a")

    bench.close_server()

    assert bench.client.aborted == ["a"]
    assert list(bench.path.parent.iterdir()) == []
    assert peer.has_ended()


def test_somebody_who_does_not_read_keeps_nobody_from_closing(bench: _Bench) -> None:
    peer = bench.connect()
    bench.submitted(peer, "a")
    bench.client.say("a", _piece("x" * _UNREAD))

    bench.close_server()


# --- long prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "long",
    [
        TextPrompt("a" * 5_000),
        TextPrompt("a" * 63_000),
        ChatPrompt([ChatMessage("user", "a" * 63_000)]),
        ChatPrompt([ChatMessage("user", "a", name="n" * 63_000)]),
        ChatPrompt([ChatMessage("user", "")] * 2000),
    ],
    ids=["text", "long text", "chat", "name", "messages"],
)
def test_a_short_prompt_does_not_wait_for_long_ones(bench: _Bench, long: Prompt) -> None:
    bench.texts.hold_long.clear()
    peer = bench.connect()
    for number in range(101, 165):
        peer.send(_submit(number, f"{number}", long))
    peer.send(_submit(1, "short", TextPrompt("a")))

    wait_until(lambda: "short" in bench.client.prompts)
    assert set(bench.client.prompts) == {"short"}


def test_a_prompt_of_a_page_does_not_wait_for_one_of_a_book(bench: _Bench) -> None:
    assert bench.server.prompt_threads(TextPrompt("a" * 60_000)) is not bench.server.prompt_threads(
        TextPrompt("a" * 70_000)
    )


# --- accepting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kvtier-engine-read", "kvtier-engine-write"])
def test_a_connection_without_a_thread_is_closed_and_the_next_one_is_served(
    bench: _Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start
    num_failed = 0

    def failing(thread: threading.Thread) -> None:
        nonlocal num_failed
        if thread.name == name and num_failed < 2:
            num_failed += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as refused:
            refused.settimeout(LIMIT_S)
            refused.connect(str(bench.path))
            assert refused.recv(1) == b""

    bench.submitted(bench.connect(), "later")


def test_accepting_outlives_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = socket.socket.accept
    errors = [OSError(errno.EMFILE, "too many open files"), OSError(errno.ECONNABORTED, "gone")]

    def failing(listener: socket.socket) -> tuple[socket.socket, Any]:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    bench = _Bench(tmp_path / "e.sock")
    try:
        bench.submitted(bench.connect(), "later")
    finally:
        bench.close()
    assert not errors
