"""An engine's process: loads the model, serves it on its socket, and ends cleanly. Imports torch."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Sequence

import msgspec

from kvtier.deploy.plan.parts import EnginePart
from kvtier.deploy.run.reports import Ready, Reporter
from kvtier.deploy.run.signals import is_signalled
from kvtier.engine.client import EngineClient
from kvtier.engine.engine import Engine
from kvtier.engine.gc_control import keeping_all
from kvtier.engine.process.hello import hello_of
from kvtier.engine.process.server import EngineServer
from kvtier.errors import EngineStopped
from kvtier.observe.recent_warnings import RecentWarnings

logger = logging.getLogger(__name__)

_MEET_S = 5.0
"""Longest wait for the HTTP server to find this engine. "Ready" promises that the HTTP server is connected."""

_DRAIN_S = 30.0
_SETTLE_S = 20.0


def run_engine(
    part: EnginePart, reporter: Reporter, signals: Sequence[signal.Signals], warnings: RecentWarnings
) -> None:
    """Run until a signal of `signals`, which must be blocked. Raises `EngineStopped` if the engine fails."""
    engine = Engine(part.engine, progress=reporter.progress)
    hello = hello_of(engine, name=part.name, model=part.served_as, started_at=time.time())
    if engine.tokenizer is not None and engine.tokenizer.stamps_date:
        logger.warning(
            "the chat template of %s writes the current date: prompts diverge when it changes", part.served_as
        )
    client = EngineClient(engine)
    registries = [engine.metrics.registry, *engine.transfer.registries]
    with contextlib.ExitStack() as stack:
        stack.callback(client.close)
        server = EngineServer(client, engine.prompts, hello, part.socket, registries, engine.partings, warnings)
        stack.callback(server.close)
        stack.enter_context(keeping_all())
        server.wait_until_met(_MEET_S)
        reporter.tell(Ready({**msgspec.to_builtins(hello), "slot_bytes": engine.arena.layout.slot_bytes}))
        while not is_signalled(signals):
            if client.failure is not None:
                raise EngineStopped(str(client.failure))
        server.refuse()
        logger.info("stopping; %d requests are running", server.num_prompts)
        _drain(client, server, signals)
        if not client.settle(_SETTLE_S):
            logger.warning("some computed blocks could not be stored in time")


def _drain(client: EngineClient, server: EngineServer, signals: Sequence[signal.Signals]) -> None:
    """Let running requests end; another signal cuts this short."""
    deadline = time.monotonic() + _DRAIN_S
    while server.num_prompts and time.monotonic() < deadline and client.failure is None:
        if is_signalled(signals):
            return
