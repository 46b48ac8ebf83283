"""One question to an engine's process over its socket, from a program such as `kvtier explain`. No torch."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TypeVar

from kvtier.engine.process.messages import (
    LENGTH_BYTES,
    AskMetrics,
    AskParting,
    FromEngine,
    Metrics,
    Parted,
    ResumeLoading,
    ToEngine,
    body_length,
    decode_reply,
    encode,
)
from kvtier.errors import EngineAway
from kvtier.tiers.parting import Parting

_NUMBER = 1
_Reply = TypeVar("_Reply", Parted, Metrics)


def ask_parting(socket_path: str, request_id: str, timeout_s: float) -> Parting | None:
    """Where a request's prompt diverged; None if the engine does not know it, or no longer does.

    Raises `EngineAway` if nothing listens there, or it does not answer in time.
    """
    return _asked(socket_path, AskParting(_NUMBER, request_id), Parted, timeout_s).parting


def ask_metrics(socket_path: str, timeout_s: float, *, resumes_loading: bool = False) -> Metrics:
    """An engine's counters; first makes it load from its tiers again if `resumes_loading`.

    Raises `EngineAway` as `ask_parting` does.
    """
    question = ResumeLoading(_NUMBER) if resumes_loading else AskMetrics(_NUMBER)
    return _asked(socket_path, question, Metrics, timeout_s)


def _asked(socket_path: str, question: ToEngine, kind: type[_Reply], timeout_s: float) -> _Reply:
    """The first reply of type `kind`."""
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
        try:
            sock.settimeout(timeout_s)
            sock.connect(socket_path)
            sock.sendall(encode(question))
            while True:
                reply = _reply(sock, deadline)
                if isinstance(reply, kind):
                    return reply
        except OSError as error:
            reason = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise EngineAway(f"no engine answers at unix:{socket_path}: {reason}") from error


def _reply(sock: socket.socket, deadline: float) -> FromEngine:
    """The next reply: the first is always a `Hello`."""
    return decode_reply(_received(sock, body_length(_received(sock, LENGTH_BYTES, deadline)), deadline))


def _received(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        piece = sock.recv(min(nbytes - len(data), 1 << 16))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return bytes(data)
