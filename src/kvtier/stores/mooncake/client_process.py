"""The process in which Mooncake's library runs: sets it up, makes the engine's calls, and ends with the engine.

Each call has a thread; its result is sent back whenever it comes, however late. One end of a pair of sockets and the
memory for blocks are descriptors inherited from the engine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvtier.errors import RemoteProtocolError
from kvtier.memory.mapped import MappedArena
from kvtier.stores.mooncake.messages import Ask, CallResult, PoolStatus, Setup, receive, send

NUM_THREADS = 24
"""Limit on calls in flight."""

_QUIET = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR", "MC_YLT_LOG_LEVEL": "error"}
_OWN_BUFFER_BYTES = 16 << 20
_PROBE_S = 2.0
_RETRY_S = 2.0
_FAILED = -1
_PR_SET_PDEATHSIG = 1


class ClientProcess:
    """Mooncake's store for one engine. `stream` is read by the main thread and written under a lock."""

    def __init__(self, stream: socket.socket, arena: MappedArena, setup: Setup, store: Any) -> None:
        self._stream = stream
        self._arena = arena
        self._setup = setup
        self._store = store
        self._lock = threading.Lock()
        self._is_set_up = False
        self._num_calls = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kvtier-mooncake-call")

    def run(self) -> None:
        """Run until the engine closes its end."""
        threading.Thread(target=self._set_up, name="kvtier-mooncake-setup", daemon=True).start()
        while isinstance(message := receive(self._stream), Ask):
            with self._lock:
                self._num_calls += 1
            self._threads.submit(self._call, message)
        with self._lock:
            is_idle = self._is_set_up and not self._num_calls
        if is_idle:  # otherwise it would crash
            self._store.close()

    def _set_up(self) -> None:
        """Try until it works. First look for the master: without one, Mooncake waits for a minute and a half."""
        setup = self._setup
        master = f"[{setup.host}]:{setup.port}" if ":" in setup.host else f"{setup.host}:{setup.port}"
        while True:
            try:
                socket.create_connection((setup.host, setup.port), _PROBE_S).close()
            except OSError as error:
                self._tell(PoolStatus(False, f"its master {master} does not answer: {error.strerror or error}"))
                time.sleep(_RETRY_S)
                continue
            code = self._store.setup(
                setup.local_host,
                setup.metadata,
                setup.memory_bytes,
                _OWN_BUFFER_BYTES,
                setup.protocol,
                setup.device,
                master,
            )
            code = code or self._store.register_buffer(self._arena.address, setup.buffer_bytes)
            if not code:
                break
            self._tell(PoolStatus(False, f"it could not be set up (code {code})"))
            time.sleep(_RETRY_S)
        with self._lock:
            self._is_set_up = True
        self._tell(PoolStatus(True))

    def _call(self, ask: Ask) -> None:
        try:
            codes = self._made(ask)
        except Exception:
            codes = [_FAILED] * max(1, len(ask.keys))
        with self._lock:
            self._num_calls -= 1
        self._tell(CallResult(ask.number, codes))

    def _made(self, ask: Ask) -> list[int]:
        addresses = [self._arena.address + offset for offset in ask.offsets]
        sizes = [ask.nbytes] * len(addresses)
        match ask.act:
            case "exist":
                codes = self._store.batch_is_exist(ask.keys)
            case "get":
                codes = self._store.batch_get_into(ask.keys, addresses, sizes)
            case "put":
                codes = self._store.batch_put_from(ask.keys, addresses, sizes)
            case "remove":
                codes = self._store.batch_remove(ask.keys, True)
            case "remove_all":
                codes = [self._store.remove_by_regex(ask.keys[0], True)]
        return [int(code) for code in codes]

    def _tell(self, message: CallResult | PoolStatus) -> None:
        with self._lock:
            try:
                send(self._stream, message)
            except OSError:
                os._exit(0)  # the engine is gone


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine ends it
    stream = socket.socket(fileno=int(sys.argv[1]))
    setup = receive(stream)
    if not isinstance(setup, Setup):
        raise RemoteProtocolError("the first message must be the setup")
    arena = MappedArena.attach(int(sys.argv[2]), setup.buffer_bytes)
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
    try:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415  # of the extra `mooncake`
    except ImportError as error:
        send(stream, PoolStatus(False, f"it cannot be loaded: {error}", is_final=True))
        receive(stream)
        os._exit(1)
    ClientProcess(stream, arena, setup, MooncakeDistributedStore()).run()
    os._exit(0)  # its threads would crash on the way out


if __name__ == "__main__":
    main()
