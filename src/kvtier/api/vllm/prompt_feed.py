"""What an engine of vLLM reports about prompts in its cache, read from kvtier's plug-in in its process.

Corrects the record of the prompts that this server has sent there. While the engine does not report, such as after it
was started without the plug-in, or with an older one, the record is used as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from kvtier.api.vllm.seen_prefixes import SeenPrefixes
from kvtier.errors import RemoteProtocolError
from kvtier.observe.log_limit import LogLimit
from kvtier.wire.prompt_news import MAX_LINE_BYTES, decode_news

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class PromptFeed:
    """Follows one engine, from `start` to `close`."""

    def __init__(self, engine: str, socket_path: str, record: SeenPrefixes, *, retry_s: float = _RETRY_S) -> None:
        self.is_followed = False
        self._engine = engine
        self._socket_path = socket_path
        self._record = record
        self._retry_s = retry_s
        self._log = LogLimit(logger)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"kvtier-prompts-{self._engine}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket_path, limit=MAX_LINE_BYTES)
            except OSError:
                pass  # the engine is starting, or does not report
            else:
                try:
                    await self._follow(reader)
                finally:
                    self.is_followed = False
                    writer.close()
            await asyncio.sleep(self._retry_s)

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Until the engine closes the connection, or sends what cannot be read."""
        try:
            while line := await reader.readline():
                self._take(line)
        except OSError:
            pass
        except (RemoteProtocolError, ValueError) as error:  # of a line that is too long
            self._log.warning("news", "engine %s reports its prompts in a way that is unknown: %s", self._engine, error)

    def _take(self, line: bytes) -> None:
        news = decode_news(line)
        if not news.is_all and not self.is_followed:
            raise RemoteProtocolError("the first line does not have all prompts")
        self.is_followed = True
        if news.is_all:
            self._record.keep_reported({prompt.prompt_id for prompt in news.prompts})
        for prompt in news.prompts:
            share = prompt.num_cached / prompt.num_tokens if prompt.num_tokens else 0.0
            self._record.correct(prompt.prompt_id, share)
