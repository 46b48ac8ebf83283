"""The page's files from the package: read once; an ETag tells versions apart."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HIDDEN = ("index.html", "login.html")
"""Served at `/` only."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    media_type: str
    etag: str

    def response(self, request: Request, status: int = 200) -> Response:
        headers = {"etag": self.etag, "cache-control": "no-cache"}
        if status == 200 and request.headers.get("if-none-match") == self.etag:
            return Response(None, 304, headers)
        response = Response(self.body, status, headers)
        response.headers["content-type"] = self.media_type
        return response


class StaticFiles:
    """The files by name. Names from requests never reach the file system."""

    def __init__(self) -> None:
        folder = resources.files("kvtier.api.page") / "static"
        self._files: dict[str, StaticFile] = {}
        for one in folder.iterdir():
            end = one.name[one.name.rfind(".") :]
            if end in _TYPES:
                body = one.read_bytes()
                etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
                self._files[one.name] = StaticFile(body, _TYPES[end], etag)

    def __getitem__(self, name: str) -> StaticFile:
        return self._files[name]

    def public(self, name: str) -> StaticFile | None:
        return None if name in _HIDDEN else self._files.get(name)
