"""Tells a router, on a Unix socket, which prompts an engine's own cache has. One thread, which never delays a step.

A router that has lost its connection connects again and gets all there is to know; there is one router at a time, the
newest. Without one, prompts are noted and nothing is looked up.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from kvtier.transfer.cached_prompts import CachedPrompts, Prompt
from kvtier.transport.address import UnixAddress
from kvtier.transport.listening import UnixListener
from kvtier.wire.prompt_news import MAX_PROMPTS, encode_news

logger = logging.getLogger(__name__)

_EVERY_S = 0.25
_SEND_S = 5.0
_LOOKED_AT_ONCE = 1024


class PromptEvents:
    """`note` is called by the engine's thread, `close` by any thread; `is_cached` by one of its own."""

    def __init__(self, address: UnixAddress, is_cached: Callable[[bytes], bool], *, every_s: float = _EVERY_S) -> None:
        """Raises `ConfigError` if the address cannot be listened on."""
        self._prompts = CachedPrompts(is_cached)
        self._every_s = every_s
        self._noted: deque[tuple[Prompt, Callable[[], bool]]] = deque(maxlen=MAX_PROMPTS)
        self._is_closed = False
        self._wake, self._woken = socket.socketpair()
        self._router: socket.socket | None = None
        try:
            self._listener = UnixListener(address)
        except BaseException:
            self._wake.close()
            self._woken.close()
            raise
        self._thread = threading.Thread(target=self._run, name="kvtier-prompt-events", daemon=True)
        self._thread.start()

    def note(self, prompt: Prompt, is_computed: Callable[[], bool]) -> None:
        """A prompt has arrived at the engine. If too many arrive at once, the oldest of them are not tracked."""
        self._noted.append((prompt, is_computed))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._wake.close()
            self._thread.join()
            self._listener.close()
            self._woken.close()

    # --- its thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._wait()
                while self._noted:
                    self._prompts.add(*self._noted.popleft())
                self._prompts.settle()
                if self._router is not None and (news := self._prompts.look(_LOOKED_AT_ONCE)):
                    self._send(encode_news(news))
        except Exception:
            logger.exception("prompts in this engine's cache are no longer reported")
        finally:
            self._drop_router()

    def _wait(self) -> None:
        """Until it is time to look again, or a router comes or goes."""
        poll = select.poll()
        for source in (self._woken, self._listener.sock, self._router):
            if source is not None:
                poll.register(source, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(self._every_s * 1000)}
        if self._router is not None and self._router.fileno() in ready:
            self._drop_router()  # it never sends: its end has come
        if self._listener.sock.fileno() in ready:
            self._meet()

    def _meet(self) -> None:
        with contextlib.suppress(OSError):
            router, _ = self._listener.sock.accept()
            self._drop_router()
            router.settimeout(_SEND_S)
            self._router = router
            self._send(encode_news(self._prompts.reported(), is_all=True))

    def _send(self, line: bytes) -> None:
        if self._router is not None:
            try:
                self._router.sendall(line)
            except OSError:
                self._drop_router()

    def _drop_router(self) -> None:
        if self._router is not None:
            self._router.close()
            self._router = None
