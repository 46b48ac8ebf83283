"""An engine's process: loads the model, serves it on its socket, and ends in good order. Imports torch."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Mapping, Sequence

import msgspec

from kvtier.deploy.plan.plan import EnginePart
from kvtier.deploy.run.reports import Ready, Reporter
from kvtier.engine.client import EngineClient
from kvtier.engine.engine import Engine
from kvtier.engine.gc_control import keeping_all
from kvtier.engine.process.hello import hello_of
from kvtier.engine.process.server import EngineServer
from kvtier.errors import EngineStopped, InvalidParameter
from kvtier.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_MEET_S = 5.0
"""So long may the HTTP server take to find this engine. Who hears that it is ready relies on its being asked."""

_DRAIN_S = 30.0
_SETTLE_S = 20.0


def run_engine(part: EnginePart, reporter: Reporter, signals: Sequence[signal.Signals]) -> None:
    """Until a signal of `signals`, which are blocked, comes. Raises `EngineStopped` when the engine fails."""
    engine = Engine(part.engine, progress=reporter.progress)
    hello = hello_of(engine, name=part.name, model=part.served_as, started_at=time.time())
    client = EngineClient(engine)
    registries = [engine.metrics.registry, *engine.transfer.registries]
    with contextlib.ExitStack() as stack:
        stack.callback(client.close)
        server = EngineServer(client, _EngineTexts(engine), hello, part.socket, registries)
        stack.callback(server.close)
        stack.enter_context(keeping_all())
        server.wait_until_met(_MEET_S)
        reporter.tell(Ready({**msgspec.to_builtins(hello), "slot_bytes": engine.arena.layout.slot_bytes}))
        while not _is_signalled(signals):
            if client.failure is not None:
                raise EngineStopped(str(client.failure))
        server.refuse()
        logger.info("stopping; %d requests are under way", client.num_requests)
        _drain(client, signals)
        if not client.settle(_SETTLE_S):
            logger.warning("not everything that was computed could be stored in time")


def _drain(client: EngineClient, signals: Sequence[signal.Signals]) -> None:
    """Let what is under way end; another signal cuts that short."""
    deadline = time.monotonic() + _DRAIN_S
    while client.num_requests and time.monotonic() < deadline and client.failure is None:
        if _is_signalled(signals):
            return


def _is_signalled(signals: Sequence[signal.Signals]) -> bool:
    """Wait a moment for one of them. A process that was stopped meanwhile gets an answer without meaning."""
    found = signal.sigtimedwait(signals, _LOOK_S)
    return found is not None and found.si_signo in signals


class _EngineTexts:
    """The engine's tokenizer, for its server."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[int, tuple[str, bytes]] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._engine.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, object]], template_values: Mapping[str, object]) -> list[int]:
        text = self._tokenizer().render_chat(messages, template_values=template_values)
        return self._engine.encode(text, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        return self._token(token_id)[0]

    def token_bytes(self, token_id: int) -> bytes:
        return self._token(token_id)[1]

    def _token(self, token_id: int) -> tuple[str, bytes]:
        found = self._known.get(token_id)
        if found is None:
            tokenizer = self._engine.tokenizer
            if tokenizer is None or tokenizer.is_absent:
                return "", b""
            found = self._known[token_id] = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        return found

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._engine.tokenizer
        if tokenizer is None or tokenizer.is_absent:
            raise InvalidParameter("the model has no tokenizer: give a prompt of token ids")
        return tokenizer
