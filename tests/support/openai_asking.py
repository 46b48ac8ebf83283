"""Asking the OpenAI-compatible server as a program without a library would."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from tests.support.fake_engine import MODEL, Running

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

Document = dict[str, Any]


def chat_body(content: object = "one two three", **fields: object) -> Document:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def completion_body(prompt: object = "one two three", **fields: object) -> Document:
    return {"model": MODEL, "prompt": prompt, **fields}


def body_for(path: str, **fields: object) -> Document:
    return chat_body(**fields) if path == CHAT else completion_body(**fields)


def documents_of(stream: str) -> list[Document]:
    """The events of a stream that is complete, without its last one, which must be [DONE]."""
    events = events_of(stream)
    assert events[-1] == "[DONE]"
    return [msgspec.json.decode(event) for event in events[:-1]]


def events_of(stream: str) -> list[str]:
    assert stream.endswith("\n\n")
    events = stream.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def error_of(response: httpx.Response) -> Document:
    """The error in OpenAI's shape, of an answer that is one."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    document = response.json()
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    return dict(document["error"])


@contextlib.contextmanager
def raw_post(server: Running, path: str, body: Document, *, num_sent: int | None = None) -> Iterator[socket.socket]:
    """A connection on which the request, or as much of its body, was sent. Leaving the scope hangs up."""
    encoded = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(encoded)}\r\n\r\n"
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(head.encode() + encoded[:num_sent])
        yield connection


def receive_until(connection: socket.socket, wanted: bytes) -> bytes:
    received = b""
    while wanted not in received:
        came = connection.recv(65536)
        assert came, f"the server hung up after {received!r}"
        received += came
    return received
