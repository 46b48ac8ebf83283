"""Protects the server from web pages: checks the host name in a request, and the origin of the page that sends it.

A browser lets any page send requests to a server on the same machine or network, with the page's origin (`Origin`) and
the host name that was looked up (`Host`). A page that points its own name at this server (DNS rebinding) has neither
an allowed name nor an allowed origin.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.api.http_error import REFUSAL, HttpError

_OPEN_PATHS = ("/health", "/ready")
"""Paths without private data: monitoring may use any host name."""

_LOCAL_ORIGINS = tuple(
    f"{scheme}://{host}{port}"
    for host in ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")
    for scheme in ("http", "https")
    for port in ("", ":*")
)
_APP_ORIGINS = ("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*")
OLLAMA_ORIGINS = _LOCAL_ORIGINS + _APP_ORIGINS
"""The origins that Ollama allows by default."""

_METHODS = "GET, POST, HEAD, DELETE, OPTIONS"
_REMEMBERED_S = "600"
_MAX_SHOWN = 60


Refuse = Callable[[HttpError, Scope, Receive, Send], Awaitable[None]]
"""Answers a request with an error in an API's form."""


@dataclass(frozen=True, slots=True)
class WebRules:
    """Origins may end with `*`; hosts may begin with one, as in `*.example.com`, or be `*`."""

    hosts: frozenset[str]
    host_ends: tuple[str, ...]
    any_host: bool
    origins: frozenset[str]
    origin_beginnings: tuple[str, ...]

    @classmethod
    def make(
        cls, *, listens_on: Sequence[str], allow_hosts: Sequence[str], allow_origins: Sequence[str], has_keys: bool
    ) -> WebRules:
        """The rules of a server. One that listens on the network also has the machine's own names.

        With keys, any host name is allowed: a page has no key, and paths without a key reveal nothing.
        """
        names = {"localhost", *(host.lower() for host in listens_on)}
        if not all(_is_loopback(host) for host in listens_on):
            own = socket.gethostname().lower()
            names |= {own, own.partition(".")[0]}
        given = [host.lower().rstrip(".") for host in allow_hosts]
        origins = [origin.lower().rstrip("/") for origin in allow_origins]
        return cls(
            hosts=frozenset({*names, *given}),
            host_ends=(".localhost", *(host[1:] for host in given if host.startswith("*."))),
            any_host=has_keys or "*" in given,
            origins=frozenset(origins),
            origin_beginnings=tuple(origin[:-1] for origin in origins if origin.endswith("*")),
        )

    def allows_host(self, header: str) -> bool:
        """Addresses are allowed, since DNS cannot redirect them, and so is no host: browsers always send one."""
        if self.any_host or not header:
            return True
        host = _host_in(header)
        return host in self.hosts or host.endswith(self.host_ends) or _is_address(host)

    def allows_origin(self, origin: str, host: str) -> bool:
        """Whether the origin is in the list, or is this server itself."""
        asked = origin.lower()
        if asked in self.origins or asked.startswith(self.origin_beginnings):
            return True
        scheme, _, own = asked.partition("://")
        return scheme in ("http", "https") and bool(own) and own == host.lower()


class WebGuard:
    """Passes requests that `rules` allow on to `app`; `refuse` answers the others in the API's form."""

    def __init__(self, app: ASGIApp, rules: WebRules, refuse: Refuse) -> None:
        self._app = app
        self._rules = rules
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host = origin = kind = wants = ""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1")
            elif name == b"origin":
                origin = value.decode("latin-1")
            elif name == b"content-type":
                kind = value.decode("latin-1")
            elif name == b"access-control-request-headers":
                wants = value.decode("latin-1")
        error = scope.get(REFUSAL) or self._error(scope, host, origin, kind)
        if error is not None:
            await self._refuse(error, scope, receive, send)
        elif not origin:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await _answer_preflight(send, origin, wants)
        else:
            await self._app(scope, receive, _allowing(send, origin))

    def _error(self, scope: Scope, host: str, origin: str, kind: str) -> HttpError | None:
        rules = self._rules
        if not rules.allows_host(host) and scope["path"] not in _OPEN_PATHS:
            sentence = f"the host name {_shown(host)} is not allowed: add it to http.allow_hosts"
            return HttpError(403, sentence, "unknown_host")
        if not origin:
            return None
        if not rules.allows_origin(origin, host):
            sentence = f"pages from {_shown(origin)} are not allowed: add the origin to http.allow_origins"
            return HttpError(403, sentence, "unknown_origin")
        is_json = kind.partition(";")[0].strip().lower() == "application/json"
        if scope["method"] == "POST" and not is_json:
            sentence = "a page must send its body as Content-Type: application/json"
            return HttpError(415, sentence, "unsupported_media_type")
        return None


def _allowing(send: Send, origin: str) -> Send:
    own = [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", b"x-request-id, retry-after"),
        (b"vary", b"Origin"),
    ]

    async def send_with_origin(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await send(message)

    return send_with_origin


async def _answer_preflight(send: Send, origin: str, wants: str) -> None:
    headers: Mapping[str, str] = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": _METHODS,
        "access-control-allow-headers": wants or "authorization, content-type",
        "access-control-max-age": _REMEMBERED_S,
        "vary": "Origin, Access-Control-Request-Headers",
    }
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 204, "headers": encoded})
    await send({"type": "http.response.body", "body": b""})


def _host_in(header: str) -> str:
    """The host name without the port and without a final dot."""
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
