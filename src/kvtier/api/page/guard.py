"""Guards the page's paths: checks sessions and the origin of requests, and sets the browser's security headers.

The guard runs after `api/web_guard` and before all routes under `/kvtier/v1`. Only under that path does a session's
cookie replace an API key.
"""

from __future__ import annotations

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.api.access import LOGGED_IN, Access, check_admin
from kvtier.api.http_error import HttpError
from kvtier.api.page.sessions import Session, Sessions
from kvtier.api.web_guard import Refuse

API = "/kvtier/v1/"
FILES = "/page/"
CSRF_HEADER = "x-kvtier-csrf"
_SESSION_PATH = f"{API}session"
_MAX_COOKIE_CHARACTERS = 4096
_READING = ("GET", "HEAD")
_SESSION_OF_SCOPE = "kvtier.session"

_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    b"content-security-policy": _CONTENT_SECURITY_POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"permissions-policy": b"camera=(), geolocation=(), microphone=()",
}


def cookie_name(scope: Scope) -> str:
    """Contains the port: cookies are shared by all ports of a host, which may run several deployments."""
    server = scope.get("server") or ("", 0)
    secure = "__Host-" if scope.get("scheme") == "https" else ""
    return f"{secure}kvtier_{server[1] or 0}"


class PageGuard:
    """`sessions` belong to the keys of `access`; without keys, pages send `open_csrf` as their CSRF token."""

    def __init__(self, access: Access, sessions: Sessions) -> None:
        self._access = access
        self._sessions = sessions
        self.open_csrf = secrets.token_urlsafe(32)

    def guarded(self, app: ASGIApp, refuse: Refuse) -> ASGIApp:
        """Wrap `app`; `refuse` answers a refused request."""

        async def guarding(scope: Scope, receive: Receive, send: Send) -> None:
            path: str = scope.get("path", "")
            if scope["type"] != "http" or not (path == "/" or path.startswith((API, FILES))):
                await app(scope, receive, send)
                return
            send = _with_headers(send, is_data=path.startswith(API))
            error = self._enter(scope, path)
            await (app(scope, receive, send) if error is None else refuse(error, scope, receive, send))

        return guarding

    def session(self, scope: Scope) -> Session | None:
        """The session of a request that the guard has let through."""
        found: Session | None = scope.get(_SESSION_OF_SCOPE)
        return found

    def session_id(self, scope: Scope) -> str:
        text = Headers(scope=scope).get("cookie", "")
        if not text or len(text) > _MAX_COOKIE_CHARACTERS:
            return ""
        try:
            morsel = SimpleCookie(text).get(cookie_name(scope))
        except CookieError:
            return ""
        return "" if morsel is None else morsel.value

    def _enter(self, scope: Scope, path: str) -> HttpError | None:
        headers = Headers(scope=scope)
        if path.startswith(API) and _is_from_another_page(headers):
            return HttpError(403, "only this server's own page may send requests to this path", "unknown_origin")
        session = self._find(scope, headers)
        if session is not None:
            scope[_SESSION_OF_SCOPE] = session
            if path.startswith(API):
                scope[LOGGED_IN] = session.tenant
        if scope["method"] in _READING or not path.startswith(API):
            return None
        return self._changing(headers, session, path)

    def _find(self, scope: Scope, headers: Headers) -> Session | None:
        """The session of a request's cookie; none if the request has a key, which takes precedence."""
        if not self._access.has_keys or "authorization" in headers or "x-api-key" in headers:
            return None
        return self._sessions.get(self.session_id(scope))

    def _changing(self, headers: Headers, session: Session | None, path: str) -> HttpError | None:
        """The error, if any, of a request that changes something. Only browsers need a token: programs send a key."""
        given = headers.get(CSRF_HEADER, "")
        if session is not None:
            is_known = session.knows(given)
        elif self._access.has_keys or not _is_browser(headers):
            return None
        else:
            is_known = hmac.compare_digest(self.open_csrf.encode(), given.encode())
        if not is_known:
            return HttpError(403, f"a page must send the csrf of /kvtier/v1/session in {CSRF_HEADER}", "wrong_csrf")
        if session is not None and path != _SESSION_PATH:
            try:
                check_admin(session.tenant)
            except HttpError as error:
                return error
        return None


def _is_browser(headers: Headers) -> bool:
    return "origin" in headers or "sec-fetch-site" in headers


def _is_from_another_page(headers: Headers) -> bool:
    """Origins in `http.allow_origins` count as other pages, too: that setting is for the APIs."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    scheme, _, host = origin.lower().partition("://")
    return scheme not in ("http", "https") or host != headers.get("host", "").lower()


def _with_headers(send: Send, *, is_data: bool) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            names = {name.lower() for name, _ in given}
            own = dict(_HEADERS)
            if is_data and b"cache-control" not in names:
                own[b"cache-control"] = b"no-store"
            message = {**message, "headers": [*given, *own.items()]}
        await send(message)

    return sending
