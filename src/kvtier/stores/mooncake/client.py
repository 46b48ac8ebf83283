"""The engine's end of its Mooncake process: calls with deadlines. Thread-safe.

A late call continues, and so do its writes to the shared memory. Its caller is notified when it is over, or when the
process has ended, and keeps its memory until then. A process that ends is restarted.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from kvtier.errors import ConfigError, RemoteProtocolError, TierTimeout, TierUnavailable
from kvtier.memory.mapped import MappedArena
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.mooncake.client_process import NUM_THREADS
from kvtier.stores.mooncake.messages import Act, Ask, CallResult, PoolStatus, Setup, receive, send

logger = logging.getLogger(__name__)

_RESTART_S = 5.0
_CLOSE_S = 5.0
_SEND_S = 2
_STARTING = "it is starting"
_MAX_LATE = 4
"""With this many late calls in flight, further ones would be late, too."""


class Call:
    """A call in flight."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._is_over = False
        self.is_late = False
        """Its caller has stopped waiting."""
        self._codes: list[int] | None = None
        self._then: list[Callable[[], None]] = []

    def wait(self, deadline: float) -> list[int]:
        """Its result. Raises `TierTimeout` at the deadline, and `TierUnavailable` if its process has ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over, max(0.0, deadline - time.monotonic())):
                self.is_late = True
                raise TierTimeout("Mooncake did not answer in time")
            if self._codes is None:
                raise TierUnavailable("the Mooncake process has ended")
            return self._codes

    def when_over(self, then: Callable[[], None]) -> None:
        """Have `then` called once this call no longer touches memory: now, or by another thread."""
        with self._changed:
            if not self._is_over:
                self._then.append(then)
                return
        then()

    def end(self, codes: list[int] | None) -> None:
        with self._changed:
            self._is_over = True
            self._codes = codes
            then, self._then = self._then, []
            self._changed.notify_all()
        for act in then:
            act()


class MooncakeClient:
    """Starts the process and keeps it running. `arena` is shared with it, and must outlive this."""

    def __init__(self, setup: Setup, arena: MappedArena, *, restart_s: float = _RESTART_S) -> None:
        self._setup = setup
        self._arena = arena
        self._restart_s = restart_s
        self._log = LogLimit(logger)
        self._changed = threading.Condition(threading.Lock())
        self._is_ready = False
        self._why_not = _STARTING
        self._is_hopeless = False
        self._calls: dict[int, Call] = {}
        self._last_number = 0
        self._stream: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = threading.Event()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="kvtier-mooncake", daemon=True)
        self._thread.start()

    @property
    def process_id(self) -> int | None:
        """None while there is no process."""
        process = self._process
        return None if process is None else process.pid

    def wait_until_ready(self, timeout_s: float, *, first_word_only: bool = False) -> bool:
        """Wait until calls can be made; False on timeout. Raises `ConfigError` if Mooncake cannot be loaded at all.

        With `first_word_only`, the first reason why they cannot be made ends the wait.
        """

        def is_known() -> bool:
            return self._is_ready or self._is_hopeless or (first_word_only and self._why_not != _STARTING)

        with self._changed:
            self._changed.wait_for(is_known, timeout_s)
            if self._is_hopeless:
                raise ConfigError(f"Mooncake cannot be used here: {self._why_not}")
            return self._is_ready

    @property
    def why_not(self) -> str:
        """The reason, in words, if calls cannot be made."""
        with self._changed:
            return "" if self._is_ready else self._why_not

    def begin(self, act: Act, keys: Sequence[str], offsets: Sequence[int] = (), nbytes: int = 0) -> Call:
        """Raises `TierUnavailable` at once if the process is not ready, or has too many calls in flight or late."""
        call = Call()
        with self._changed:
            if not self._is_ready:
                raise TierUnavailable(f"Mooncake is not ready: {self._why_not}")
            if sum(other.is_late for other in self._calls.values()) >= _MAX_LATE:
                raise TierUnavailable("Mooncake has not answered several calls yet")
            if len(self._calls) >= NUM_THREADS:
                raise TierUnavailable(f"Mooncake has {len(self._calls)} calls in flight already")
            self._last_number += 1
            number = self._last_number
            self._calls[number] = call
            stream, process = self._stream, self._process
        assert stream is not None
        assert process is not None
        try:
            with self._sending:
                send(stream, Ask(number, act, list(keys), list(offsets), nbytes))
        except OSError:
            process.kill()  # half a message may have been sent: the keeper starts another process
            raise TierUnavailable("the Mooncake process does not read its messages") from None
        return call

    def close(self) -> None:
        """Ends calls in flight. Nothing touches the arena afterwards."""
        self._is_closed.set()
        stream, process = self._stream, self._process
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_WR)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive() and process is not None:
            process.kill()
        self._thread.join()

    # --- private: the keeper's thread ------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._is_closed.is_set():
            try:
                self._run()
            except OSError as error:
                self._log.warning("start", "the Mooncake process cannot be started: %s", str(error))
            if self._is_hopeless:
                return
            self._is_closed.wait(self._restart_s)

    def _run(self) -> None:
        """Run one process, from its start to its end."""
        stream, theirs = socket.socketpair()
        try:
            with theirs:
                # It ends with this thread, even if it hangs.
                process = self._started(theirs)
        except OSError:
            stream.close()
            raise
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        with self._changed:
            self._stream, self._process = stream, process
        try:
            send(stream, self._setup)
            if self._is_closed.is_set():
                stream.shutdown(socket.SHUT_WR)  # `close` may have come before there was a stream
            self._listen(stream)
        except (OSError, RemoteProtocolError) as error:
            self._log.warning("broken", "the Mooncake process was ended: %s", str(error))
        finally:
            self._end(stream, process)

    def _started(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        shared = (theirs.fileno(), self._arena.fd)
        return subprocess.Popen(
            # -P: run no module of the working folder
            [sys.executable, "-P", "-m", "kvtier.stores.mooncake.client_process", *map(str, shared)],
            pass_fds=shared,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # Mooncake reports every second that its master is gone
        )

    def _listen(self, stream: socket.socket) -> None:
        while (message := receive(stream)) is not None:
            match message:
                case PoolStatus():
                    self._hear(message)
                    if message.is_final:
                        return
                case CallResult():
                    with self._changed:
                        call = self._calls.pop(message.number, None)
                    if call is not None:
                        call.end(message.codes)
                case _:
                    raise RemoteProtocolError("a message that only an engine sends")

    def _hear(self, news: PoolStatus) -> None:
        with self._changed:
            self._is_ready, self._why_not = news.is_ready, news.sentence
            self._is_hopeless = news.is_final
            self._changed.notify_all()
        if news.is_ready:
            logger.info("Mooncake is ready")
        else:
            self._log.warning("setup", "Mooncake is not ready: %s", news.sentence)

    def _end(self, stream: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """Nothing of the process remains afterwards, so its calls are over."""
        if self._is_closed.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CLOSE_S)
        process.kill()
        status = process.wait()
        with self._changed:
            self._is_ready = False
            if not self._is_hopeless:
                self._why_not = "its process has ended"
            self._stream = self._process = None
            calls, self._calls = list(self._calls.values()), {}
        with self._sending:
            stream.close()
        for call in calls:
            call.end(None)
        if not self._is_closed.is_set() and not self._is_hopeless:
            self._log.warning("ended", "the Mooncake process has ended with status %d, and is restarted", status)
