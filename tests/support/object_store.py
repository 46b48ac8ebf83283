"""An object store for tests: the part of S3 that kvtier uses, over HTTP on loopback, which can be told to fail."""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Literal
from xml.sax.saxutils import escape

import pytest

from tests.support.waiting import LIMIT_S

obstore = pytest.importorskip("obstore")
obstore.put(obstore.store.MemoryStore(), "first", b"")  # starts its threads, which stay for good

Fault = Literal["refuse", "fail", "hang", "cut", "lie", "short"]

_BUCKET = "blocks"
_MAX_BODY = 64 << 20


class ObjectServer:
    """`objects` are its bytes by name. `fault` is what it does wrong from now on; `num_read` counts ranges read."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault: Fault | None = None
        self.num_read = 0
        self.is_over = threading.Event()
        server = self

        class Handler(_Handler):
            store = server

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, name="object-server")
        self._thread.start()

    @property
    def url(self) -> str:
        return f"s3://{_BUCKET}/kv"

    @property
    def settings(self) -> dict[str, str]:
        port = self._http.server_address[1]
        return {"endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1", "skip_signature": "true"}

    def close(self) -> None:
        self.is_over.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ObjectServer

    def do_GET(self) -> None:
        name, query = self._name()
        if self._fails():
            return
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0])
            return
        payload = self.store.objects.get(name)
        if payload is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        found = re.fullmatch(r"bytes=(\d{1,12})-(\d{1,12})", self.headers.get("Range", ""))
        assert found is not None, "a read without a range"
        start, end = int(found[1]), min(int(found[2]) + 1, len(payload))
        if start >= len(payload):
            self._answer(416, b"")
            return
        part = payload[start:end]
        self.store.num_read += 1
        if self.store.fault == "lie":
            part = bytes(byte ^ 1 for byte in part)
        if self.store.fault == "short":
            part = part[: len(part) // 2]
        headers = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(payload)}"}
        self._answer(206, part, headers, is_cut=self.store.fault == "cut")

    def do_HEAD(self) -> None:
        name, _ = self._name()
        if self._fails():
            return
        payload = self.store.objects.get(name)
        self._answer(404 if payload is None else 200, b"" if payload is None else payload)

    def do_PUT(self) -> None:
        name, _ = self._name()
        length = int(self.headers["Content-Length"])
        assert length <= _MAX_BODY
        body = self.rfile.read(length)
        if not self._fails():
            self.store.objects[name] = body
            self._answer(200, b"")

    def do_DELETE(self) -> None:
        name, _ = self._name()
        if not self._fails():
            self.store.objects.pop(name, None)
            self._answer(204, b"")

    def do_POST(self) -> None:
        body = self.rfile.read(min(_MAX_BODY, int(self.headers["Content-Length"]))).decode()
        if self._fails():
            return
        names = re.findall(r"<Key>([^<]{1,1024})</Key>", body)
        for name in names:
            self.store.objects.pop(name, None)
        gone = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        self._answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _name(self) -> tuple[str, dict[str, list[str]]]:
        parts = urllib.parse.urlsplit(self.path)
        name = urllib.parse.unquote(parts.path).removeprefix(f"/{_BUCKET}").removeprefix("/")
        return name, urllib.parse.parse_qs(parts.query, keep_blank_values=True)

    def _fails(self) -> bool:
        match self.store.fault:
            case "refuse":
                self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
            case "fail":
                self._answer(500, b"<Error><Code>InternalError</Code></Error>")
            case "hang":
                self.store.is_over.wait(LIMIT_S)
                self.close_connection = True
            case _:
                return False
        return True

    def _list(self, prefix: str) -> None:
        found = [
            f"<Contents><Key>{escape(name)}</Key><Size>{len(payload)}</Size><ETag>x</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, payload in list(self.store.objects.items())
            if name.startswith(prefix)
        ]
        listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(found)}</ListBucketResult>"
        self._answer(200, listing.encode())

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, is_cut: bool = False) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            more = {"ETag": "x", "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **(headers or {})}
            for name, value in more.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if is_cut:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            elif self.command != "HEAD":
                self.wfile.write(body)


@contextlib.contextmanager
def object_server() -> Iterator[ObjectServer]:
    server = ObjectServer()
    try:
        yield server
    finally:
        server.close()
