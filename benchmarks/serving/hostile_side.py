"""One hostile client until it is ended: `python -m benchmarks.serving.hostile_side ATTACK OPENAI_PORT OLLAMA_PORT`.

Its requests are made in advance, so that the client does not take the processor from the measured programs.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

_MODEL = "model"
_TIMEOUT_S = 60.0
_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_NUM_DRIPS = 300
_NUM_UNREAD = 16


def _request(path: str, body: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def _openai(path: str, **fields: object) -> bytes:
    return _request(path, json.dumps({"model": _MODEL, **fields}).encode())


def _again_and_again(port: int, request: bytes, pause_s: float = 0.05) -> None:
    """Send a request, and read the whole answer."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as sock:
            sock.sendall(request)
            sock.recv(65536)
        time.sleep(pause_s)


def _huge_numbers(openai: int, ollama: int) -> None:
    _again_and_again(openai, _openai(_COMPLETIONS, prompt=[1], min_tokens=2**63, max_tokens=2**63), 0.5)


def _long_duration(openai: int, ollama: int) -> None:
    body = {"model": _MODEL, "prompt": "a", "keep_alive": "1" * 30_000 + "x"}
    _again_and_again(ollama, _request("/api/generate", json.dumps(body).encode()))


def _shared_stop(openai: int, ollama: int) -> None:
    _again_and_again(openai, _openai(_COMPLETIONS, prompt=["a"] * 400, stop=["x" * 8_000_000]))


def _million_stops(openai: int, ollama: int) -> None:
    stop = [f"{number:06x}" for number in range(1_000_000)]
    _again_and_again(openai, _openai(_COMPLETIONS, prompt="a", stop=stop, max_tokens=64))


def _template_names(openai: int, ollama: int) -> None:
    names = {f"x{number}" * 20: 1 for number in range(1)} | {"a" * 4_000_000: 1}
    messages = [{"role": "user", "content": "hi"}]
    _again_and_again(openai, _openai(_CHAT, messages=messages, chat_template_kwargs=names))


def _lists(openai: int, ollama: int) -> None:
    body = b'{"model":"model","prompt":[' + b"[]," * 20_000_000 + b"[]]}"
    _again_and_again(openai, _request(_COMPLETIONS, body))


def _numbers(openai: int, ollama: int) -> None:
    body = b'{"model":"model","prompt":[' + b"1.2345678901234567e-300," * 400_000 + b"1]}"
    _again_and_again(openai, _request(_COMPLETIONS, body))


def _drips(openai: int, ollama: int) -> None:
    """Many bodies, each sent a byte now and then."""
    socks: list[socket.socket] = []
    while True:
        while len(socks) < _NUM_DRIPS:
            sock = socket.create_connection(("127.0.0.1", openai), _TIMEOUT_S)
            sock.sendall(_request(_COMPLETIONS, b"{", 1_000_000))
            socks.append(sock)
        for sock in list(socks):
            try:
                sock.sendall(b" ")
            except OSError:
                sock.close()
                socks.remove(sock)
        time.sleep(1.0)


def _streams(openai: int) -> list[socket.socket]:
    request = _openai(_COMPLETIONS, prompt=[1, 2], max_tokens=2000, n=4, ignore_eos=True, stream=True, logprobs=20)
    socks = []
    for _ in range(_NUM_UNREAD):
        sock = socket.create_connection(("127.0.0.1", openai), _TIMEOUT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(request)
        socks.append(sock)
    return socks


def _unread(openai: int, ollama: int) -> None:
    """Streams that are never read."""
    socks = _streams(openai)
    time.sleep(3600)
    del socks


def _read(openai: int, ollama: int) -> None:
    """The same streams, read: no attack, but a comparison."""
    socks = _streams(openai)
    while True:
        for sock in select.select(socks, [], [])[0]:
            if not sock.recv(1 << 20):
                time.sleep(3600)


def _flood(port: int, begin: bytes, again: bytes) -> None:
    """Send without reading; start again when the server hangs up."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as sock:
            sock.sendall(begin)
            while True:
                sock.sendall(again)


def _chunks(openai: int, ollama: int) -> None:
    head = f"POST {_COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    _flood(openai, head.encode(), b"1\r\n \r\n" * 200_000)


def _pipelined(openai: int, ollama: int) -> None:
    _flood(openai, b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000)


def _logprobs(openai: int, ollama: int) -> None:
    body = _openai(_COMPLETIONS, prompt=[[5]] * 64, max_tokens=300, logprobs=20, ignore_eos=True)
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", openai), _TIMEOUT_S) as sock:
            sock.sendall(body.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            while sock.recv(1 << 20):
                pass


def _several_lists(openai: int, ollama: int) -> None:
    request = _request(_COMPLETIONS, b'{"model":"model","prompt":"a","stop":[' + b"[]," * 20_000_000 + b"[]]}")
    threads = [threading.Thread(target=_again_and_again, args=(openai, request), daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _leaving(openai: int, ollama: int) -> None:
    """Bodies just large enough for another process, whose sender is gone before they are read.

    Nothing in them is work for the engine, which would make tokens of a long prompt.
    """
    request = _request(_COMPLETIONS, b'{"model":"model","prompt":{}}' + b" " * 33_000)
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", openai), _TIMEOUT_S) as sock:
            sock.sendall(request)
            time.sleep(0.002)
        time.sleep(0.01)


ATTACKS: Mapping[str, Callable[[int, int], None]] = {
    "min_tokens of 2**63": _huge_numbers,
    "keep_alive of 30 kB": _long_duration,
    "400 prompts, a stop of 8 MB": _shared_stop,
    "a million stops": _million_stops,
    "a template name of 4 MB": _template_names,
    "60 MB of empty lists": _lists,
    "10 MB of long numbers": _numbers,
    "six times 60 MB of empty lists": _several_lists,
    "33 kB whose sender leaves": _leaving,
    "chunks of a byte": _chunks,
    "3000 requests at once": _pipelined,
    "300 bodies that drip": _drips,
    "64 answers with logprobs": _logprobs,
    "16 streams not read": _unread,
    "the same streams, read": _read,
}

ENGINE_WORK = ("64 answers with logprobs", "16 streams not read", "the same streams, read")
"""A client has a right to the engine's work for these: they take their share from other answers."""


if __name__ == "__main__":
    ATTACKS[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
