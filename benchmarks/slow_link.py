"""A TCP link of a given speed: a process that forwards bytes between its own port and a server.

    python -m benchmarks.slow_link HOST:PORT BYTES_PER_SECOND

All connections share the rate, which applies to the bytes from the server. It prints its port, and ends with its
parent.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

_PIECE_BYTES = 16 << 10


class _Pace:
    """Schedules when each piece may be sent."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._bytes_per_s
            free_at = self._free_at
        delay = free_at - time.monotonic()
        if delay > 0:
            time.sleep(delay)


@contextlib.contextmanager
def slow_link(address: str, bytes_per_s: float) -> Iterator[str]:
    """A slow way to the server at `address` (`tcp://host:port`)."""
    target = address.removeprefix("tcp://")
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.slow_link", target, str(bytes_per_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"tcp://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def _pass_on(source: socket.socket, target: socket.socket, pace: _Pace | None) -> None:
    try:
        while piece := source.recv(_PIECE_BYTES):
            if pace is not None:
                pace.wait(len(piece))
            target.sendall(piece)
    except OSError:
        pass
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, target: tuple[str, int], pace: _Pace) -> None:
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(target)
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_pass_on, args=(client, server, None), daemon=True).start()
        threading.Thread(target=_pass_on, args=(server, client, pace), daemon=True).start()


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    pace = _Pace(float(sys.argv[2]))
    threading.Thread(target=_serve, args=(listener, (host, int(port)), pace), daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
