"""Serves an engine over a Unix socket, to the HTTP server's process. Any number of connections, two threads each.

The engine's thread only hands over a step's results; the connection's writing thread turns them into messages and sends
them. A few threads make prompts from text and chats, so a long one delays no other.
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
from typing import TypeAlias

import msgspec
from prometheus_client import CollectorRegistry

from kvtier.blocks.hashing import HASH_BYTES, split_hashes
from kvtier.engine.answer import Completion, StreamPiece
from kvtier.engine.client import Admitted, EngineClient, StreamEvent, Submission
from kvtier.engine.parting.partings import Partings
from kvtier.engine.process.messages import (
    FAILED,
    GRAMMAR,
    INVALID,
    LENGTH_BYTES,
    MAX_PROMPT_END_CHARACTERS,
    STOPPED,
    TOO_LONG,
    Abort,
    Accepted,
    AskParting,
    AskUsedPrefixes,
    AskWarnings,
    ChatPrompt,
    Detokenize,
    Detokenized,
    EngineHello,
    FromEngine,
    MetricFamily,
    Metrics,
    Parted,
    Prompt,
    Refused,
    ResumeLoading,
    Retained,
    Sample,
    StepOutputs,
    StopLoading,
    Submit,
    TextPrompt,
    ToEngine,
    Tokenize,
    Tokenized,
    TokenPrompt,
    UsedPrefixes,
    Warnings,
    body_length,
    decode_request,
    encode,
)
from kvtier.engine.process.prompt_making import asked_prompt, encoded_chat, retained_parts, tokens_of
from kvtier.engine.prompt_token import PromptToken
from kvtier.engine.retentions import EngineRetentions
from kvtier.engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from kvtier.engine.thinking_marks import ends_in_thought
from kvtier.errors import AnswerFailed, InvalidGrammar, KvtierError, PromptTooLong, RemoteProtocolError, RequestError
from kvtier.models.prompt_encoder import PromptEncoder
from kvtier.observe.log_limit import LogLimit
from kvtier.observe.recent_warnings import RecentWarnings
from kvtier.tiers.retention import MAX_ASKS, RetentionOutcome
from kvtier.transport.address import UnixAddress
from kvtier.transport.listening import UnixListener

logger = logging.getLogger(__name__)

_MAX_ENDS_BYTES = (1 << 16) * HASH_BYTES
_NUM_PROMPT_THREADS = 2
_SHORT_CHARACTERS = (4 << 10, 64 << 10)
_LENGTHS = ("short", "middle", "long")
"""Prompts up to each of these lengths, and longer ones, have separate threads."""

_CHARACTERS_OF_MESSAGE = 32
"""The cost of rendering one message in a template, in characters of text."""

_Outgoing: TypeAlias = Sequence[tuple[str, StreamEvent]] | FromEngine | None
"""News of a step by request, a message, or None for the end."""

_FLUSH_S = 2.0
_ACCEPT_AGAIN_S = 0.5


class EngineServer:
    """Listens once constructed. Call `refuse` to accept no new requests, then `close` to stop."""

    def __init__(
        self,
        client: EngineClient,
        prompts: PromptEncoder,
        hello: EngineHello,
        socket_path: str,
        registries: Sequence[CollectorRegistry] = (),
        partings: Partings | None = None,
        warnings: RecentWarnings | None = None,
    ) -> None:
        """Raises `ConfigError` if the socket cannot be used. Without `partings`, prompts are compared with nothing."""
        self.client = client
        self.prompts = prompts
        self.hello = hello
        self.registries = registries
        self.partings = Partings(None) if partings is None else partings
        self.warnings = RecentWarnings() if warnings is None else warnings
        self.log_limit = LogLimit(logger)
        self.is_refusing = False
        self._lock = threading.Lock()
        self._connections: set[_ClientConnection] = set()
        self._is_met = threading.Event()
        self._is_closing = threading.Event()
        self._threads = {
            kind: ThreadPoolExecutor(_NUM_PROMPT_THREADS, f"kvtier-{kind}-prompt") for kind in (*_LENGTHS, "grammar")
        }
        self._listener = UnixListener(UnixAddress(socket_path))
        self.partings.asked_at = f"unix:{socket_path}"
        self._accepting = threading.Thread(target=self._accept, name="kvtier-accept-engine", daemon=True)
        self._accepting.start()

    def wait_until_met(self, timeout_s: float) -> bool:
        """Wait until a client has received the `EngineHello`, and so can send requests. False on timeout."""
        return self._is_met.wait(timeout_s)

    def note_met(self) -> None:
        self._is_met.set()

    def refuse(self) -> None:
        """Accept no more prompts: clients are told to retry later, or elsewhere. `num_prompts` counts those before."""
        self.is_refusing = True

    @property
    def num_prompts(self) -> int:
        """Accepted prompts that are not over, also while they are being tokenized."""
        with self._lock:
            connections = list(self._connections)
        return sum(connection.num_prompts for connection in connections)

    def close(self) -> None:
        """Requests in progress are cut off."""
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
        for threads in self._threads.values():
            threads.shutdown()

    def threads_for(self, request: Submit) -> ThreadPoolExecutor | None:
        """The threads that tokenize its prompt; None if there is nothing to do.

        Long prompts have threads of their own, and so have grammars that are not compiled yet: they take seconds, and
        short prompts must not wait for them.
        """
        grammar = request.params.grammar
        if grammar is not None and not self.client.has_compiled(grammar):
            return self._threads["grammar"]
        return None if isinstance(request.prompt, TokenPrompt) else self.prompt_threads(request.prompt)

    def prompt_threads(self, prompt: Prompt) -> ThreadPoolExecutor:
        """The threads that tokenize it, or detokenize its tokens."""
        if isinstance(prompt, ChatPrompt):
            num_characters = _CHARACTERS_OF_MESSAGE * len(prompt.messages) + prompt.num_characters
        else:
            num_characters = prompt.num_characters if isinstance(prompt, TextPrompt) else len(prompt.token_ids)
        return self._threads[_LENGTHS[bisect.bisect_left(_SHORT_CHARACTERS, num_characters)]]

    @property
    def retentions(self) -> EngineRetentions:
        return self.client.engine.retentions

    @property
    def slow_threads(self) -> ThreadPoolExecutor:
        """For work that takes as long as making a long prompt."""
        return self._threads["long"]

    def forget(self, connection: _ClientConnection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def _accept(self) -> None:
        """Accept until `close`, despite errors: a process out of descriptors or threads may recover."""
        while not self._is_closing.is_set():
            try:
                self._meet(self._listener.sock.accept()[0])
            except (OSError, RuntimeError) as error:
                if not self._is_closing.wait(_ACCEPT_AGAIN_S):
                    logger.warning("a connection could not be accepted: %s", error)

    def _meet(self, sock: socket.socket) -> None:
        """Raises `RuntimeError` if the process may have no more threads; the connection is then closed."""
        connection = _ClientConnection(self, sock)
        with self._lock:
            self._connections.add(connection)
        try:
            connection.start()
        except RuntimeError:
            self.forget(connection)
            raise


class _ClientConnection:
    """A client's connection, and the sink of its requests, which end with it."""

    def __init__(self, server: EngineServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._submissions: dict[int, Submission | None] = {}
        """None while the prompt is being made. A number that is missing was aborted, or is over."""
        self._num_left: dict[int, int] = {}
        self._prompt_ends: dict[int, str] = {}
        """The ends of conversations whose `Accepted` is not sent yet."""
        self._outbox: queue.SimpleQueue[_Outgoing] = queue.SimpleQueue()
        self._outbox.put(server.hello)
        self._reading = threading.Thread(target=self._read, name="kvtier-engine-read", daemon=True)
        self._writing = threading.Thread(target=self._write, name="kvtier-engine-write", daemon=True)

    def start(self) -> None:
        """Raises `RuntimeError` if a thread cannot be started; the connection is then closed."""
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
        """Pending messages are sent as far as the client reads them."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
        self._writing.join(_FLUSH_S)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._reading.join()
        self._writing.join()

    def put(self, news: Sequence[tuple[str, StreamEvent]]) -> None:
        """Called by the engine's thread."""
        self._outbox.put(news)

    @property
    def num_prompts(self) -> int:
        with self._lock:
            return len(self._submissions)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while (head := self._receive(LENGTH_BYTES)) is not None:
                body = self._receive(body_length(head))
                if body is None:
                    break
                self._take(decode_request(body))
        except (OSError, RemoteProtocolError) as error:
            logger.warning("a connection is dropped: %s", error)
        finally:
            with self._lock:
                left = [one for one in self._submissions.values() if one is not None]
                self._submissions.clear()
            for submission in left:
                submission.abort()
            self._outbox.put(None)

    def _receive(self, nbytes: int) -> bytes | None:
        """`nbytes` bytes, or None at the end."""
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
            with self._lock:  # so that `num_prompts` counts it, or it is refused
                is_refused = self._server.is_refusing
                if not is_refused:
                    self._submissions[request.number] = None
            if is_refused:
                self._outbox.put(Refused(request.number, STOPPED, "the engine is stopping"))
                return
            threads = self._server.threads_for(request)
            if threads is None:
                self._submit(request)
            else:
                threads.submit(self._submit, request)
        elif isinstance(request, Abort):
            with self._lock:
                submission = self._submissions.pop(request.number, None)
            if submission is not None:
                submission.abort()
        elif isinstance(request, (Tokenize, Detokenize)):
            prompt = request.prompt if isinstance(request, Tokenize) else TokenPrompt(request.token_ids)
            if self._server.is_refusing:
                self._outbox.put(Refused(request.number, STOPPED, "the engine is stopping"))
            else:
                self._server.prompt_threads(prompt).submit(self._translate, request)
        elif isinstance(request, AskParting):
            self._server.slow_threads.submit(self._explain, request.number, request.request_id)
        elif isinstance(request, AskWarnings):
            self._outbox.put(Warnings(request.number, self._server.warnings.newest()))
        elif isinstance(request, AskUsedPrefixes):
            uses = self._server.client.engine.uses.take(split_hashes(request.ends[:_MAX_ENDS_BYTES]))
            self._outbox.put(UsedPrefixes(request.number, uses))
        elif isinstance(request, ResumeLoading):
            self._server.slow_threads.submit(self._switch_loading, request.number, "")
        elif isinstance(request, StopLoading):
            self._server.slow_threads.submit(self._switch_loading, request.number, request.because)
        else:
            self._tell_metrics(request.number)

    def _switch_loading(self, number: int, off_because: str) -> None:
        """Runs in a thread for prompts."""
        if off_because:
            self._server.client.stop_loading(off_because)
        else:
            self._server.client.resume_loading()
        self._tell_metrics(number)

    def _tell_metrics(self, number: int) -> None:
        server = self._server
        self._outbox.put(
            Metrics(number, _families(server.registries), server.client.loading_off, server.client.was_told)
        )

    def _submit(self, request: Submit) -> None:
        """Runs in a thread for prompts, unless the prompt is already tokens."""
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
            tokens, params = self._made(request)
            if not request.warms:
                self._compare(request, tokens)
            submission = server.client.submit(
                tokens,
                params,
                request_id=request.request_id,
                salt=request.salt,
                client=request.client,
                warms=request.warms,
                sink=self,
            )
        except KvtierError as error:
            self._outbox.put([(request.request_id, error)])
            return
        except Exception as error:  # raised by a tokenizer or a template
            logger.exception("a prompt could not be made")
            self._outbox.put([(request.request_id, AnswerFailed(f"the prompt could not be made: {error}"))])
            return
        with self._lock:
            is_wanted = number in self._submissions
            if is_wanted:
                self._submissions[number] = submission
        if not is_wanted:  # aborted meanwhile
            submission.abort()
            return
        self._retain(request, tokens)
        if request.explains:
            self._explain(number, request.request_id)

    def _compare(self, request: Submit, tokens: Sequence[int]) -> None:
        """Compare the prompt with recorded ones; a failure does not affect its answer."""
        try:
            self._server.partings.compare(asked_prompt(request, tokens))
        except Exception as error:
            self._server.log_limit.warning("compare", "a prompt could not be compared: %s", str(error))

    def _retain(self, request: Submit, tokens: Sequence[int]) -> None:
        """Have the tiers keep the requested parts; the outcome is reported later."""
        if not request.retention:
            return

        def tell(outcomes: list[RetentionOutcome]) -> None:
            self._outbox.put(Retained(request.number, outcomes))

        asks = retained_parts(request.prompt, request.retention[:MAX_ASKS], tokens, self._server.prompts)
        self._server.retentions.ask(request.request_id, tokens, request.salt, asks, tell)

    def _explain(self, number: int, request_id: str) -> None:
        """Runs in a thread for prompts."""
        try:
            parting = self._server.partings.explain(request_id)
        except Exception as error:  # raised by a tokenizer or a template
            self._server.log_limit.warning("explain", "where a prompt diverged could not be found: %s", str(error))
            parting = None
        self._outbox.put(Parted(number, parting))

    def _made(self, request: Submit) -> tuple[list[int], SamplingParams]:
        """A prompt's tokens, and its parameters as the prompt requires them."""
        prompts, prompt, params = self._server.prompts, request.prompt, request.params
        if isinstance(prompt, TextPrompt) and prompt.suffix:
            infill = prompts.encode_infill(prompt.text, prompt.suffix)
            stops = (*params.stop_token_ids, *infill.stop_token_ids)[:MAX_STOP_TOKEN_IDS]
            return infill.token_ids, msgspec.structs.replace(params, stop_token_ids=stops)
        if not isinstance(prompt, ChatPrompt):
            return tokens_of(prompts, prompt), params
        chat = encoded_chat(prompts, prompt)
        prompt_end = self._prompt_ends[request.number] = chat.text[-MAX_PROMPT_END_CHARACTERS:]
        if prompt.grammar_in_thought is not None and ends_in_thought(prompt_end):
            params = msgspec.structs.replace(params, grammar=prompt.grammar_in_thought)
        return chat.token_ids, params

    def _translate(self, request: Tokenize | Detokenize) -> None:
        """Runs in a thread for prompts."""
        prompts = self._server.prompts
        reply: FromEngine
        try:
            if isinstance(request, Detokenize):
                text = prompts.decode(request.token_ids, skip_special_tokens=request.skip_special_tokens)
                reply = Detokenized(request.number, text)
            else:
                token_ids = tokens_of(prompts, request.prompt)
                texts = prompts.token_texts(token_ids) if request.with_texts else []
                reply = Tokenized(request.number, token_ids, texts)
        except KvtierError as error:
            reply = _refusal(request.number, error)
        except Exception as error:  # raised by a tokenizer or a template
            logger.exception("a prompt could not be made")
            reply = Refused(request.number, FAILED, f"the prompt could not be made: {error}")
        self._outbox.put(reply)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Write until a None, which marks the end, and everything before it."""
        try:
            is_open = True
            while is_open:
                items = [self._outbox.get(), *self._waiting()]
                is_open = all(item is not None for item in items)
                if message := b"".join(map(encode, self._messages(items))):
                    self._sock.sendall(message)
                self._server.note_met()
        except OSError as error:
            logger.info("the client has gone: %s", error)
        finally:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._reading.join()
            self._sock.close()
            self._server.forget(self)

    def _waiting(self) -> Iterable[_Outgoing]:
        """The other items that are already queued."""
        while not self._outbox.empty():
            yield self._outbox.get()

    def _messages(self, items: Iterable[_Outgoing]) -> Iterable[FromEngine]:
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
                    for found in (*(news.logprobs or ()), *(_ids_in(token) for token in news.prompt or ())):
                        token_bytes |= {token_id: self._server.prompts.token_bytes(token_id) for token_id in found}
                    pieces.append((number, self._sent(request_id, number, news)))
                elif isinstance(news, Admitted):
                    yield Accepted(number, news.prompt_tokens, self._prompt_ends.pop(number, ""))
                else:
                    self._server.partings.forget(request_id)
                    self._num_left[number] = 1
                    self._note_end(request_id, number)
                    yield _refusal(number, news)
        if pieces:
            yield StepOutputs(pieces, token_bytes)

    def _sent(self, request_id: str, number: int, piece: StreamPiece) -> StreamPiece:
        """The piece as it is sent; the last one of an answer ends the answer."""
        completion = piece.completion
        if completion is None:
            return piece
        if piece.index == 0:
            self._server.partings.finish(request_id, completion.token_ids)
        self._note_end(request_id, number)
        return _without_what_was_said(piece, completion)

    def _note_end(self, request_id: str, number: int) -> None:
        self._num_left[number] -= 1
        if not self._num_left[number]:
            with self._lock:
                del self._num_left[number]
                self._prompt_ends.pop(number, None)
                self._numbers.pop(request_id, None)
                self._submissions.pop(number, None)


def _ids_in(token: PromptToken) -> set[int]:
    return {token.token_id, *token.logprobs}


def _without_what_was_said(last: StreamPiece, completion: Completion) -> StreamPiece:
    """The last piece of an answer, as `StepOutputs` carries it."""
    cached = {tier: count for tier, count in completion.cached_tokens.items() if count}
    rest = dataclasses.replace(completion, text="", logprobs=None, cached_tokens=cached, prompt_logprobs=None)
    return msgspec.structs.replace(last, completion=rest)


def _refusal(number: int, error: Exception) -> Refused:
    if isinstance(error, PromptTooLong):
        return Refused(number, TOO_LONG, str(error))
    if isinstance(error, InvalidGrammar):
        return Refused(number, GRAMMAR, str(error))
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
