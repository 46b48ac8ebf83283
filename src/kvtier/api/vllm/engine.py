"""The HTTP server's view of one engine of vLLM: whether it runs and answers, and how busy it is.

Runs in the server's event loop. An idle connection shows when the process ends; the path `/health` shows whether it
answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvtier.api.engine_connection import DEFAULT_PATIENCE, ProbeTimes
from kvtier.api.limits import MAX_TRANSLATED_BYTES
from kvtier.api.vllm.exchange import Exchange, ExchangeError

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_OK = 200


@dataclass(frozen=True, slots=True)
class VllmHello:
    """What a server of vLLM tells about its model. `since` is when it was first reached, in seconds of the epoch."""

    since: float
    max_model_len: int | None = None
    root: str = ""


class VllmEngine:
    """`hello` is None while the engine is away. `is_hung` while it is connected but fails its health check.
    `is_leaving` once it is told to stop: its socket has no name, so it gets no new requests, and completes its others.

    The event `lost` is set while the engine is away, `hung` while it is hung. `num_requests` counts requests in flight,
    `num_asked` all requests so far; the senders of requests update both. `note_up` is called whenever the engine
    connects, or answers again.
    """

    def __init__(
        self, name: str, socket_path: str, patience: ProbeTimes = DEFAULT_PATIENCE, prompts_path: str = ""
    ) -> None:
        """It reports prompts in its cache on `prompts_path`, if there is one."""
        self.name = name
        self.socket_path = socket_path
        self.prompts_path = prompts_path
        self.hello: VllmHello | None = None
        self.is_hung = False
        self.is_leaving = False
        self.num_requests = 0
        self.num_asked = 0
        self.num_starts = 0
        self.lost = asyncio.Event()
        self.hung = asyncio.Event()
        self.note_up: Callable[[VllmEngine], None] = lambda engine: None
        self._patience = patience
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self.hello is not None and not self.is_hung and not self.is_leaving

    @property
    def status(self) -> Literal["starting", "stopping", "hung", "ready"]:
        if self.hello is None:
            return "starting"
        if self.is_leaving:
            return "stopping"
        return "hung" if self.is_hung else "ready"

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"kvtier-watch-{self.name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def suspect(self) -> None:
        """A request to the engine failed: it counts as away until it passes a health check, if it is not leaving."""
        if not self._note_leaving():
            self._lose()
            self._wake.set()

    async def is_well(self) -> bool:
        """Whether the engine passes a health check now."""
        try:
            status, _ = await self.get("/health", self._patience.hung_after_s)
        except (ExchangeError, TimeoutError):
            return False
        return status == _OK

    async def get(self, path: str, timeout_s: float, max_bytes: int = MAX_TRANSLATED_BYTES) -> tuple[int, bytes]:
        """Status and body of a GET. Raises `ExchangeError`, also if the body is too large, and `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            exchange = await Exchange.send(self.socket_path, "GET", path, ())
            try:
                await exchange.head()
                pieces: list[bytes] = []
                while piece := await exchange.read():
                    pieces.append(piece)
                    if sum(map(len, pieces)) > max_bytes:
                        raise ExchangeError("the answer is too large", was_sent=True)
                return exchange.status, b"".join(pieces)
            finally:
                exchange.close()

    async def _run(self) -> None:
        while True:
            lifeline = await self._open_lifeline()
            if lifeline.is_open:
                try:
                    await self._watch(lifeline)
                finally:
                    lifeline.close()
            self._lose()
            await asyncio.sleep(_RETRY_S)

    async def _open_lifeline(self) -> _Lifeline:
        lifeline = _Lifeline(self._wake)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._patience.hung_after_s):
                await asyncio.get_running_loop().create_unix_connection(lambda: lifeline, self.socket_path)
        return lifeline

    async def _watch(self, lifeline: _Lifeline) -> None:
        """Check the engine's health until the connection is lost, or the engine is suspected after it was up."""
        while lifeline.is_open:
            self._wake.clear()
            is_well = await self.is_well()
            if is_well and self.hello is None:
                await self._meet()
            if self.hello is not None and not self._note_leaving() and self.is_hung == is_well:
                self._note_hung(not is_well)
            wait_s = self._patience.ask_every_s if self.is_up else _RETRY_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait_s)
                if self.hello is None:
                    return

    async def _meet(self) -> None:
        max_model_len, root = None, ""
        with contextlib.suppress(ExchangeError, TimeoutError, ValueError, LookupError, TypeError):
            _, body = await self.get("/v1/models", self._patience.hung_after_s)
            found = json.loads(body)["data"][0]
            root = str(found.get("root") or "")
            max_model_len = int(found["max_model_len"])
        self.hello = VllmHello(time.time(), max_model_len, root)
        self.lost.clear()
        self.num_starts += 1
        logger.info("engine %s is connected", self.name)
        self.note_up(self)

    def _note_hung(self, is_hung: bool) -> None:
        self.is_hung = is_hung
        if is_hung:
            logger.error("engine %s is hung: no answer, %d requests in flight", self.name, self.num_requests)
            self.hung.set()
        else:
            logger.info("engine %s answers again", self.name)
            self.hung.clear()
            self.note_up(self)

    def _note_leaving(self) -> bool:
        """Whether the engine is leaving, which does not change until it is away."""
        if self.hello is not None and not self.is_leaving and not os.path.exists(self.socket_path):
            logger.info("engine %s is stopping, %d requests are in flight", self.name, self.num_requests)
            self.is_leaving = True
        return self.is_leaving

    def _lose(self) -> None:
        if self.hello is not None:
            level = logging.INFO if self.is_leaving and not self.num_requests else logging.WARNING
            logger.log(level, "engine %s is gone, %d requests were in flight", self.name, self.num_requests)
        self.hello = None
        self.is_hung = False
        self.is_leaving = False
        self.hung.clear()
        self.lost.set()


class _Lifeline(asyncio.Protocol):
    """A connection without traffic, which breaks when the server's process ends."""

    def __init__(self, wake: asyncio.Event) -> None:
        self._wake = wake
        self._transport: asyncio.BaseTransport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._wake.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
