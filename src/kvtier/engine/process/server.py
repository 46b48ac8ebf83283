"""An engine behind a Unix socket: what the HTTP server's process asks. Any number of connections, two threads each.

The engine's thread only hands over what a step brought; turning it into messages and sending them is the connection's
writing thread. Prompts are made from text and chats by a few threads, so that a long one holds nobody up.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
import queue
import socket
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from prometheus_client import CollectorRegistry

from kvtier.engine.answer import Completion, StreamPiece
from kvtier.engine.client import Admitted, EngineClient, News, Submission
from kvtier.engine.process.messages import (
    FAILED,
    INVALID,
    LENGTH_BYTES,
    STOPPED,
    TOO_LONG,
    Abort,
    Accepted,
    ChatPrompt,
    FromEngine,
    Hello,
    MetricFamily,
    Metrics,
    Prompt,
    Refused,
    Sample,
    StepOutputs,
    Submit,
    TextPrompt,
    ToEngine,
    TokenPrompt,
    body_length,
    decode_request,
    encode,
)
from kvtier.errors import AnswerFailed, KvtierError, PromptTooLong, RemoteProtocolError, RequestError
from kvtier.models.prompt_encoder import PromptEncoder
from kvtier.transport.address import UnixAddress
from kvtier.transport.listening import UnixListener

logger = logging.getLogger(__name__)

_NUM_PROMPT_THREADS = 2
_SHORT_CHARACTERS = (4 << 10, 64 << 10)
"""Prompts up to each of these, and longer ones, are made by threads of their own."""

_CHARACTERS_OF_MESSAGE = 32
"""What a template takes for a message, counted in characters of text."""

_FLUSH_S = 2.0
_ACCEPT_AGAIN_S = 0.5


class EngineServer:
    """Listening from construction on. `close` first refuses what is new, lets what is under way end, then stops."""

    def __init__(
        self,
        client: EngineClient,
        prompts: PromptEncoder,
        hello: Hello,
        socket_path: str,
        registries: Sequence[CollectorRegistry] = (),
    ) -> None:
        """Raises `ConfigError` when the socket cannot be used."""
        self.client = client
        self.prompts = prompts
        self.hello = hello
        self.registries = registries
        self.is_refusing = False
        self._lock = threading.Lock()
        self._connections: set[_ClientConnection] = set()
        self._is_met = threading.Event()
        self._is_closing = threading.Event()
        self._prompt_threads = [
            ThreadPoolExecutor(_NUM_PROMPT_THREADS, f"kvtier-{length}-prompt") for length in ("short", "middle", "long")
        ]
        self._listener = UnixListener(UnixAddress(socket_path))
        self._accepting = threading.Thread(target=self._accept, name="kvtier-accept-engine", daemon=True)
        self._accepting.start()

    def wait_until_met(self, timeout_s: float) -> bool:
        """Until somebody has been told what runs here, and can ask. False when nobody comes in time."""
        return self._is_met.wait(timeout_s)

    def note_met(self) -> None:
        self._is_met.set()

    def refuse(self) -> None:
        """Take no more prompts: whoever asks is told to ask again later, or elsewhere."""
        self.is_refusing = True

    def close(self) -> None:
        """What is under way is broken off."""
        self.is_refusing = True
        self._is_closing.set()
        with contextlib.suppress(OSError):
            self._listener.sock.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()
        for threads in self._prompt_threads:
            threads.shutdown()

    def threads_for(self, prompt: Prompt) -> ThreadPoolExecutor:
        """Those that make tokens of it. Long prompts have their own: they take seconds, and short ones do not wait."""
        if isinstance(prompt, ChatPrompt):
            num_characters = sum(_CHARACTERS_OF_MESSAGE + message.num_characters for message in prompt.messages)
        else:
            num_characters = len(prompt.text) if isinstance(prompt, TextPrompt) else 0
        return self._prompt_threads[bisect.bisect_left(_SHORT_CHARACTERS, num_characters)]

    def forget(self, connection: _ClientConnection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def _accept(self) -> None:
        """Until `close`, whatever goes wrong: a process without descriptors or threads may have some again later."""
        while not self._is_closing.is_set():
            try:
                self._meet(self._listener.sock.accept()[0])
            except (OSError, RuntimeError) as error:
                if not self._is_closing.wait(_ACCEPT_AGAIN_S):
                    logger.warning("a connection could not be accepted: %s", error)

    def _meet(self, sock: socket.socket) -> None:
        """Raises `RuntimeError` when the process may have no more threads; the connection is then closed."""
        connection = _ClientConnection(self, sock)
        with self._lock:
            self._connections.add(connection)
        try:
            connection.start()
        except RuntimeError:
            self.forget(connection)
            raise


class _ClientConnection:
    """Somebody who asks. Its requests end with it. It is the sink of all of them."""

    def __init__(self, server: EngineServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._submissions: dict[int, Submission | None] = {}
        """None while the prompt is being made. A number that is not here was aborted, or is over."""
        self._num_left: dict[int, int] = {}
        self._outbox: queue.SimpleQueue[Sequence[tuple[str, News]] | FromEngine | None] = queue.SimpleQueue()
        self._outbox.put(server.hello)
        self._reading = threading.Thread(target=self._read, name="kvtier-engine-read", daemon=True)
        self._writing = threading.Thread(target=self._write, name="kvtier-engine-write", daemon=True)

    def start(self) -> None:
        """Raises `RuntimeError` when a thread cannot be started; the connection is then closed."""
        try:
            self._reading.start()
            self._writing.start()
        except RuntimeError:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            if self._reading.ident is not None:
                self._reading.join()
            self._sock.close()
            raise

    def close(self) -> None:
        """What it is owed is sent, as far as somebody reads it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
        self._writing.join(_FLUSH_S)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._reading.join()
        self._writing.join()

    def put(self, news: Sequence[tuple[str, News]]) -> None:
        """Called by the engine's thread."""
        self._outbox.put(news)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while (head := self._receive(LENGTH_BYTES)) is not None:
                body = self._receive(body_length(head))
                if body is None:
                    break
                self._take(decode_request(body))
        except (OSError, RemoteProtocolError) as error:
            logger.warning("a connection is given up: %s", error)
        finally:
            with self._lock:
                left = [one for one in self._submissions.values() if one is not None]
                self._submissions.clear()
            for submission in left:
                submission.abort()
            self._outbox.put(None)

    def _receive(self, nbytes: int) -> bytes | None:
        """So many bytes, or None at the end."""
        buffer = bytearray(nbytes)
        view = memoryview(buffer)
        while view:
            received = self._sock.recv_into(view)
            if not received:
                return None
            view = view[received:]
        return bytes(buffer)

    def _take(self, request: ToEngine) -> None:
        if isinstance(request, Submit):
            if self._server.is_refusing:
                self._outbox.put(Refused(request.number, STOPPED, "the engine is stopping"))
                return
            with self._lock:
                self._submissions[request.number] = None
            if isinstance(request.prompt, TokenPrompt):
                self._submit(request)  # nothing to make
            else:
                self._server.threads_for(request.prompt).submit(self._submit, request)
        elif isinstance(request, Abort):
            with self._lock:
                submission = self._submissions.pop(request.number, None)
            if submission is not None:
                submission.abort()
        else:
            self._outbox.put(Metrics(request.number, _families(self._server.registries)))

    def _submit(self, request: Submit) -> None:
        """In a thread for prompts, unless the prompt is there already."""
        server, number = self._server, request.number
        with self._lock:
            if number not in self._submissions:
                return
            is_known = request.request_id in self._numbers
            if is_known:
                del self._submissions[number]
            else:
                self._numbers[request.request_id] = number
                self._num_left[number] = request.params.n
        if is_known:
            sentence = f"a request with the id {request.request_id} is being served already"
            self._outbox.put(Refused(number, INVALID, sentence))
            return
        try:
            tokens = _tokens(server.prompts, request.prompt)
            submission = server.client.submit(
                tokens,
                request.params,
                request_id=request.request_id,
                salt=request.salt,
                client=request.client,
                sink=self,
            )
        except KvtierError as error:
            self._outbox.put([(request.request_id, error)])
            return
        except Exception as error:  # a tokenizer's, or a template's
            logger.exception("a prompt could not be made")
            self._outbox.put([(request.request_id, AnswerFailed(f"the prompt could not be made: {error}"))])
            return
        with self._lock:
            is_wanted = number in self._submissions
            if is_wanted:
                self._submissions[number] = submission
        if not is_wanted:  # aborted meanwhile
            submission.abort()

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Until the end, a None, and what came before it."""
        try:
            is_open = True
            while is_open:
                items = [self._outbox.get(), *self._waiting()]
                is_open = all(item is not None for item in items)
                if message := b"".join(map(encode, self._messages(items))):
                    self._sock.sendall(message)
                self._server.note_met()
        except OSError as error:
            logger.info("nobody listens any more: %s", error)
        finally:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._reading.join()
            self._sock.close()
            self._server.forget(self)

    def _waiting(self) -> Iterable[Sequence[tuple[str, News]] | FromEngine | None]:
        """What else is there already."""
        while not self._outbox.empty():
            yield self._outbox.get()

    def _messages(self, items: Iterable[Sequence[tuple[str, News]] | FromEngine | None]) -> Iterable[FromEngine]:
        pieces: list[tuple[int, StreamPiece]] = []
        token_bytes: dict[int, bytes] = {}
        for item in items:
            if item is None:
                continue
            if not isinstance(item, Sequence):
                yield item
                continue
            for request_id, news in item:
                number = self._numbers.get(request_id)
                if number is None:
                    continue
                if isinstance(news, StreamPiece):
                    for found in news.logprobs or ():
                        token_bytes |= {token_id: self._server.prompts.token_bytes(token_id) for token_id in found}
                    if news.completion is not None:
                        self._note_end(request_id, number)
                        news = _without_what_was_said(news, news.completion)
                    pieces.append((number, news))
                elif isinstance(news, Admitted):
                    yield Accepted(number, news.prompt_tokens)
                else:
                    self._num_left[number] = 1
                    self._note_end(request_id, number)
                    yield _refusal(number, news)
        if pieces:
            yield StepOutputs(pieces, token_bytes)

    def _note_end(self, request_id: str, number: int) -> None:
        self._num_left[number] -= 1
        if not self._num_left[number]:
            with self._lock:
                del self._num_left[number]
                self._numbers.pop(request_id, None)
                self._submissions.pop(number, None)


def _tokens(prompts: PromptEncoder, prompt: Prompt) -> list[int]:
    if isinstance(prompt, TextPrompt):
        return prompts.encode(prompt.text, add_special_tokens=prompt.adds_special_tokens)
    if isinstance(prompt, ChatPrompt):
        messages: list[dict[str, object]] = [
            {"role": one.role, "content": one.content, **({"name": one.name} if one.name else {})}
            for one in prompt.messages
        ]
        return prompts.encode_chat(messages, prompt.template_values)
    return prompt.token_ids


def _without_what_was_said(last: StreamPiece, completion: Completion) -> StreamPiece:
    """The last piece of an answer, as `StepOutputs` carries it."""
    cached = {tier: count for tier, count in completion.cached_tokens.items() if count}
    rest = dataclasses.replace(completion, text="", logprobs=None, cached_tokens=cached)
    return msgspec.structs.replace(last, completion=rest)


def _refusal(number: int, error: Exception) -> Refused:
    if isinstance(error, PromptTooLong):
        return Refused(number, TOO_LONG, str(error))
    if isinstance(error, RequestError):
        return Refused(number, INVALID, str(error))
    if isinstance(error, AnswerFailed):
        return Refused(number, FAILED, str(error))
    return Refused(number, STOPPED, str(error))


def _families(registries: Iterable[CollectorRegistry]) -> list[MetricFamily]:
    return [
        MetricFamily(
            family.name,
            family.type,
            family.documentation,
            [Sample(sample.name, dict(sample.labels), sample.value) for sample in family.samples],
        )
        for registry in registries
        for family in registry.collect()
    ]
