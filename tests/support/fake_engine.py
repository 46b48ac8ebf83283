"""An engine without a model, and the HTTP server over it: what the tests of both APIs run on. No torch.

`FakeEngine` speaks `engine/process/messages.py` over a real Unix socket, in a thread of its own. What it says to a
prompt is a script: an iterator over messages, events to wait for, and `DIE`. Scripts see nothing of HTTP. `running`
is the real server on a loopback port, in a thread too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import threading
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import uvicorn

from kvtier.api.config import ApiConfig, ApiKey, EngineAddress, PageConfig, ServedModelConfig
from kvtier.api.engine_connection import ProbeTimes
from kvtier.api.server import http_server, make_service
from kvtier.api.service import Service
from kvtier.api.tracing import Tracing
from kvtier.blocks.hashing import split_hashes
from kvtier.engine.answer import Completion, StreamPiece
from kvtier.engine.prefix_uses import PrefixUses
from kvtier.engine.process.messages import (
    LENGTH_BYTES,
    Abort,
    Accepted,
    AskMetrics,
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
    Refused,
    Retained,
    Sample,
    StepOutputs,
    Submit,
    TextPrompt,
    Tokenize,
    Tokenized,
    UsedPrefixes,
    Warnings,
    body_length,
    decode_request,
    encode,
)
from kvtier.observe.recent_warnings import LoggedWarning
from kvtier.tiers.parting import Parting
from kvtier.tiers.retention import RetentionAsk, RetentionOutcome
from tests.support.waiting import LIMIT_S, wait_until

MODEL: Final = "tiny"
ALIAS: Final = "kvtier/tiny:latest"
MAX_MODEL_LEN: Final = 1000

HELLO: Final = EngineHello(
    engine="engine-0",
    model="tiny",
    architecture="LlamaForCausalLM",
    dtype="float32",
    quantization="",
    weights_bytes=1 << 20,
    num_parameters=1 << 18,
    vocab_size=512,
    max_model_len=MAX_MODEL_LEN,
    block_tokens=16,
    num_blocks=64,
    kv_bytes=1 << 22,
    device="cpu",
    namespace="0123456789abcdef0123456789abcdef",
    has_tokenizer=True,
    chat_template="{{ messages }}",
    started_at=1_700_000_000.0,
)


class _Death:
    pass


DIE: Final = _Death()
"""In a script: the process is gone, with everything that was asked of it."""

Step = FromEngine | threading.Event | _Death
Script = Callable[[Submit], Iterator[Step]]


# --- scripts ----------------------------------------------------------------------------------------------------------


def prompt_words(submit: Submit | Tokenize) -> list[str]:
    """The words of a prompt: of a conversation those of its last message, of token ids their numbers."""
    prompt = submit.prompt
    if isinstance(prompt, TextPrompt):
        return prompt.text.split()
    if isinstance(prompt, ChatPrompt):
        return prompt.messages[-1].content.split()
    return [str(token_id) for token_id in prompt.token_ids]


def echo(submit: Submit) -> Iterator[Step]:
    """Says the prompt's words again, a token each, once per answer; as many as `max_tokens` allows."""
    yield accepted(submit)
    yield from pieces(submit, prompt_words(submit))


def word_tokens(asked: Tokenize) -> Step:
    """A token for each of the prompt's words."""
    return Tokenized(asked.number, list(range(len(prompt_words(asked)))))


def accepted(submit: Submit) -> Accepted:
    return Accepted(submit.number, len(prompt_words(submit)))


def pieces(submit: Submit, words: list[str], *, cached: dict[str, int] | None = None) -> Iterator[StepOutputs]:
    """`words` as the answer, and its end; one message per token, in which all answers go on."""
    count = len(words) if submit.params.max_tokens is None else min(len(words), submit.params.max_tokens)
    reason = "stop" if count == len(words) else "length"
    for position in range(count):
        text = words[position] if position == 0 else " " + words[position]
        is_last = position == count - 1
        completion = ending(reason, count, cached=cached) if is_last else None
        yield said(submit, text, completion=completion, cached=None if position else cached)
    if not count:
        yield said(submit, completion=ending(reason, 0, cached=cached))


def said(
    submit: Submit, *texts: str, completion: Completion | None = None, cached: dict[str, int] | None = None
) -> StepOutputs:
    """A token for each of `texts`, the same in every answer. The likeliest others are called `text1` and so on."""
    likely = [{f"{text}{rank or ''}".encode(): -0.5 - rank for rank in reversed(range(20))} for text in texts]
    return outputs(submit, "".join(texts), [text.encode() for text in texts], likely, completion, cached)


def outputs(
    submit: Submit,
    text: str,
    tokens: Sequence[bytes],
    likely: Sequence[Mapping[bytes, float]] = (),
    completion: Completion | None = None,
    cached: dict[str, int] | None = None,
) -> StepOutputs:
    """The result of a step for every answer to a prompt, with tokens given by their bytes."""
    has_logprobs = submit.params.logprobs is not None
    logprobs = [{zlib.crc32(raw): logprob for raw, logprob in found.items()} for found in likely]
    pieces = [
        StreamPiece(
            index,
            [zlib.crc32(raw) for raw in tokens],
            text,
            logprobs if has_logprobs else None,
            None if completion is None else dataclasses.replace(completion, index=index),
            cached=None if index else cached,
        )
        for index in range(submit.params.n)
    ]
    token_bytes = {zlib.crc32(raw): raw for found in likely for raw in found} if has_logprobs else {}
    return StepOutputs([(submit.number, piece) for piece in pieces], token_bytes)


def ending(
    reason: str,
    count: int,
    *,
    cached: dict[str, int] | None = None,
    seconds_per_token: float = 0.02,
    stop: str | None = None,
) -> Completion:
    """Of an answer of `count` tokens."""
    tiers = {"device": 0, "server": 0} if cached is None else cached
    return Completion(0, [0] * count, "", reason, None, 0.01, seconds_per_token, tiers, stop)


def words_then(words: list[str], *, then: Step) -> Script:
    """Send some words of an answer that does not end, and then this."""

    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        for word in words:
            yield said(submit, word)
        yield then

    return script


def held(until: threading.Event, script: Script = echo) -> Script:
    """Nothing is said, not even that the prompt was accepted, before `until`."""

    def after(submit: Submit) -> Iterator[Step]:
        yield until
        yield from script(submit)

    return after


def held_once_accepted(until: threading.Event) -> Script:
    """The prompt is accepted, and no token comes before `until`."""

    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield until
        yield from pieces(submit, prompt_words(submit))

    return script


def refusing(reason: str, sentence: str) -> Script:
    """`reason` is one of `TOO_LONG`, `INVALID`, `STOPPED` of the messages."""

    def script(submit: Submit) -> Iterator[Step]:
        yield Refused(submit.number, reason, sentence)

    return script


# --- the engine -------------------------------------------------------------------------------------------------------


class FakeEngine:
    """Listens on `path` from `start` to `stop`, which may alternate. `close` ends the thread.

    `script` may be changed at any time and holds for prompts that come later. `submits`, `tokenizes` and `aborts` (the
    numbers of submits) are what was received, in order.
    """

    def __init__(self, path: Path, *, hello: EngineHello = HELLO, script: Script = echo) -> None:
        self.path = path
        self.hello = hello
        self.script = script
        self.submits: list[Submit] = []
        self.tokenizes: list[Tokenize] = []
        self.tokenizing: Callable[[Tokenize], Step] = word_tokens
        self.aborts: list[int] = []
        self.warnings: list[LoggedWarning] = []
        self.uses = PrefixUses()
        self.partings: dict[str, Parting] = {}
        self.loading_off = ""
        self.canary_checks: dict[str, int] = {}
        self.levels: dict[str, int] = {}
        """Gauges by name, such as `held_blocks`."""
        self.loaded_bytes = 0
        self.stored_bytes = 0
        self._is_awake = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.AbstractServer | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"kvtier-fake-{hello.engine}", daemon=True)
        self._thread.start()
        self.start()

    @property
    def last(self) -> Submit:
        return self.submits[-1]

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(self.hello.engine, str(self.path))

    def start(self) -> None:
        self._call(self._listen())

    def stop(self) -> None:
        """Behave like a killed process: connections break, and nothing listens."""
        self._call(self._die())

    def freeze(self) -> None:
        """Behave as after SIGSTOP: nothing is read or sent until `thaw`; connections stay open."""
        self._is_awake.clear()
        self._loop.call_soon_threadsafe(self._is_awake.wait)

    def thaw(self) -> None:
        self._is_awake.set()

    def close(self) -> None:
        self.thaw()
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.result(LIMIT_S)

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def _die(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        for writer in list(self._writers):
            writer.transport.abort()
        own = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._note()
        self._writers.add(writer)
        writer.write(encode(self.hello))
        try:
            while True:
                request = decode_request(await reader.readexactly(body_length(await reader.readexactly(LENGTH_BYTES))))
                if isinstance(request, Abort):
                    self.aborts.append(request.number)
                elif isinstance(request, AskMetrics):
                    writer.write(encode(Metrics(request.number, self._families(), self.loading_off)))
                elif isinstance(request, AskWarnings):
                    writer.write(encode(Warnings(request.number, self.warnings)))
                elif isinstance(request, AskUsedPrefixes):
                    uses = self.uses.take(split_hashes(request.ends))
                    writer.write(encode(UsedPrefixes(request.number, uses)))
                elif isinstance(request, AskParting):
                    writer.write(encode(Parted(request.number, self.partings.get(request.request_id))))
                elif isinstance(request, Tokenize):
                    self.tokenizes.append(request)
                    step = self.tokenizing(request)
                    if isinstance(step, _Death):
                        await self._die()
                    elif not isinstance(step, threading.Event):
                        writer.write(encode(step))
                elif isinstance(request, Detokenize):
                    writer.write(encode(Detokenized(request.number, " ".join(map(str, request.token_ids)))))
                else:
                    self.submits.append(request)
                    if request.retention:
                        writer.write(encode(Retained(request.number, [kept(ask) for ask in request.retention])))
                    asyncio.get_running_loop().create_task(self._answer(request, writer, self.script))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, submit: Submit, writer: asyncio.StreamWriter, script: Script) -> None:
        self._note()
        for step in script(submit):
            if isinstance(step, threading.Event):
                while not step.is_set() and submit.number not in self.aborts:
                    await asyncio.sleep(0.002)
            elif isinstance(step, _Death):
                await self._die()
            elif submit.number not in self.aborts:
                writer.write(encode(step))
                await asyncio.sleep(0)

    def _families(self) -> list[MetricFamily]:
        steps = [Sample("kvtier_engine_steps_total", {}, 7.0)]
        checks = [
            Sample("kvtier_engine_canary_checks_total", {"result": result}, float(count))
            for result, count in self.canary_checks.items()
        ]
        loaded = [Sample("kvtier_tier_loaded_bytes_total", {"tier": "server"}, float(self.loaded_bytes))]
        stored = [Sample("kvtier_tier_stored_bytes_total", {"tier": "server"}, float(self.stored_bytes))]
        return [
            MetricFamily("kvtier_tier_loaded_bytes", "counter", "Loaded.", loaded),
            MetricFamily("kvtier_tier_stored_bytes", "counter", "Stored.", stored),
            MetricFamily("kvtier_engine_steps", "counter", "Steps.", steps),
            MetricFamily("kvtier_engine_canary_checks", "counter", "Checks.", checks),
            *(
                MetricFamily(
                    f"kvtier_engine_{name}", "gauge", "Now.", [Sample(f"kvtier_engine_{name}", {}, float(now))]
                )
                for name, now in self.levels.items()
            ),
        ]

    def _note(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def kept(ask: RetentionAsk) -> RetentionOutcome:
    """All of a prompt of four blocks is kept, for an hour at most."""
    granted_ttl_s = min(ask.ttl_s, 3600.0)
    return RetentionOutcome(
        asked_tokens=64,
        asked_ttl_s=ask.ttl_s,
        priority=ask.priority,
        granted_tokens=64,
        granted_ttl_s=granted_ttl_s,
        tier="server",
        reason="" if granted_ttl_s == ask.ttl_s else "an hour at most",
    )


# --- the server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Running:
    """An HTTP server under test. `service` belongs to its thread: read it, and set plain flags at most."""

    url: str
    address: tuple[str, int]
    service: Service


def config_of(
    *engines: FakeEngine,
    keys: tuple[ApiKey, ...] = (),
    default_options: dict[str, object] | None = None,
    max_body_bytes: int = 1 << 20,
    max_requests: int = 64,
    page: PageConfig | None = None,
) -> ApiConfig:
    """One model, `MODEL` or `ALIAS`, on all these engines."""
    model = ServedModelConfig(
        names=(MODEL, ALIAS),
        engines=tuple(engine.address for engine in engines),
        default_options=default_options or {},
    )
    return ApiConfig(
        models=(model,), keys=keys, max_body_bytes=max_body_bytes, max_requests=max_requests, drain_s=1.0, page=page
    )


PATIENT = ProbeTimes(hung_after_s=LIMIT_S)
"""A fake engine on a busy machine is slow, not hung."""


@contextlib.contextmanager
def running(
    api: str,
    config: ApiConfig,
    patience: ProbeTimes = PATIENT,
    tracing: Tracing | None = None,
    port: int = 0,
) -> Iterator[Running]:
    """The server of one API ("openai" or "ollama"), which is connected to the running engines."""
    listener = socket.create_server(("127.0.0.1", port))
    address = listener.getsockname()
    started: Future[tuple[Service, Callable[[], None]]] = Future()

    async def serve() -> None:
        service = make_service(config, patience, tracing)
        service.large_bodies.idle_s = 0.0  # a test leaves no process behind
        service.large_bodies.timeout_s = LIMIT_S  # on a busy machine a process takes long to start
        server = http_server(api, service)
        service.start()
        try:
            serving = asyncio.create_task(server.serve([listener]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.002)
            started.set_result((service, lambda: _end_serving(server)))
            await serving
        finally:
            await service.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name=f"kvtier-test-{api}", daemon=True)
    thread.start()
    try:
        service, end = started.result(LIMIT_S)
        there = [one for model in config.models for one in model.engines if Path(one.socket).exists()]
        wait_until(
            lambda: (
                sum(connection.hello is not None for connection in service.engines.connections)
                + sum(engine.is_up for engine in service.vllm.engines)
                >= len(there)
            )
        )
        try:
            yield Running(f"http://{address[0]}:{address[1]}", address, service)
        finally:
            end()
    finally:
        thread.join(LIMIT_S)
        listener.close()


def http_client(server: Running, *, key: str | None = None) -> httpx.Client:
    """A client that keeps no connection, so that it may outlive a test."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=server.url, headers=headers, limits=limits, timeout=LIMIT_S, trust_env=False)


@contextlib.contextmanager
def fake_engine(
    directory: Path, *, name: str = "engine-0", script: Script = echo, hello: EngineHello = HELLO
) -> Iterator[FakeEngine]:
    """`directory` is best a short one: a Unix socket's path has 107 bytes."""
    engine = FakeEngine(directory / f"{name}.sock", hello=msgspec.structs.replace(hello, engine=name), script=script)
    try:
        yield engine
    finally:
        engine.close()


def _end_serving(server: uvicorn.Server) -> None:
    server.force_exit = True
    server.should_exit = True
