"""The routes of a server's page: its files, its JSON, its event stream and its log-in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvtier.api.access import Access, ApiTenant, check_reader
from kvtier.api.config import PageConfig
from kvtier.api.http_error import HttpError
from kvtier.api.limits import MAX_LOGGED_REQUESTS, MAX_PAGE_BODY_BYTES, PAGE_SESSION_S
from kvtier.api.page.board import Board
from kvtier.api.page.guard import PageGuard, cookie_name
from kvtier.api.page.hub import Hub
from kvtier.api.page.sessions import Session, Sessions
from kvtier.api.page.static_files import StaticFiles
from kvtier.api.page.view import View
from kvtier.api.streaming import StreamedAnswer
from kvtier.api.web_guard import Refuse

_DEFAULT_REQUESTS = 100
_MAX_KEY_CHARACTERS = 1024
_MAX_ID_CHARACTERS = 256
_BODY_S = 10.0


class _LogIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str


class Page:
    """The page of `view`. `may_change` says whether this server has named prefixes, and paths that change what is
    cached.
    """

    def __init__(self, view: View, access: Access, config: PageConfig, *, may_change: bool = True) -> None:
        self._view = view
        self._access = access
        self._may_change = may_change
        self._sessions = Sessions()
        self._guard = PageGuard(access, self._sessions)
        self._files = StaticFiles()
        self.board = Board(view, config)
        self.hub = Hub(self.board, view.rest)

    def guarded(self, app: ASGIApp, refuse: Refuse) -> ASGIApp:
        return self._guard.guarded(app, refuse)

    def close(self) -> None:
        """End all streams and stop reading the view. Safe to call twice."""
        self.hub.close()
        self.board.close()
        self._view.close()

    def routes(self) -> list[Route]:
        return [
            Route("/", self._index),
            Route("/page/{name}", self._file),
            Route("/kvtier/v1/session", self._show_session, methods=["GET"]),
            Route("/kvtier/v1/session", self._log_in, methods=["POST"]),
            Route("/kvtier/v1/session", self._log_out, methods=["DELETE"]),
            Route("/kvtier/v1/state", self._state),
            Route("/kvtier/v1/history", self._history),
            Route("/kvtier/v1/namespaces", self._namespaces),
            Route("/kvtier/v1/requests", self._requests),
            Route("/kvtier/v1/requests/{request_id}", self._request),
            Route("/kvtier/v1/warnings", self._warnings),
            Route("/kvtier/v1/events", self._events),
        ]

    # --- files and log-in ---------------------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        """The page, or the log-in form if a session is needed and missing."""
        is_in = not self._access.has_keys or self._guard.session(request.scope) is not None
        if is_in:
            return self._files["index.html"].response(request)
        return self._files["login.html"].response(request, 401)

    async def _file(self, request: Request) -> Response:
        found = self._files.public(request.path_params["name"])
        if found is None:
            raise HttpError(404, "the page has no such file", "unknown_url")
        return found.response(request)

    async def _show_session(self, request: Request) -> Response:
        """What the page may do. Needs no key: the answer tells nothing about the server."""
        return _json(self._session_fields(self._guard.session(request.scope)))

    async def _log_in(self, request: Request) -> Response:
        """Raises `WrongKey` for an unknown key; repeated wrong keys are answered more and more slowly."""
        if not self._access.has_keys:
            raise HttpError(400, "this server has no API keys: no log-in is needed", "no_keys")
        try:
            given = msgspec.json.decode(await _small_body(request), type=_LogIn)
        except msgspec.MsgspecError as error:
            raise HttpError(400, 'the body must be {"key": "..."}', "invalid_body") from error
        if len(given.key) > _MAX_KEY_CHARACTERS or not given.key.isascii():
            raise HttpError(400, "key must be ASCII and not too long", "invalid_value", "key")
        tenant = self._access.holder(given.key.strip())
        check_reader(tenant)
        session_id, session = self._sessions.begin(tenant)
        response = _json(self._session_fields(session))
        _set_cookie(request, response, session_id, round(PAGE_SESSION_S))
        return response

    async def _log_out(self, request: Request) -> Response:
        self._sessions.end(self._guard.session_id(request.scope))
        response = _json(self._session_fields(None))
        _set_cookie(request, response, "", 0)
        return response

    def _session_fields(self, session: Session | None) -> dict[str, object]:
        has_keys = self._access.has_keys
        csrf = self._guard.open_csrf if not has_keys else None if session is None else session.csrf
        may_change = self._may_change and (not has_keys or (session is not None and session.tenant.is_admin))
        return {
            "needs_key": has_keys,
            "is_in": not has_keys or session is not None,
            "key": None if session is None else session.tenant.name,
            "may_change": may_change,
            "has_prefixes": self._may_change,
            "csrf": csrf,
        }

    # --- data ---------------------------------------------------------------------------------------------------------

    async def _state(self, request: Request) -> Response:
        self._reader(request)
        return _json(await self.board.state())

    async def _history(self, request: Request) -> Response:
        """Prompt tokens by tier, over the last hour or day."""
        self._reader(request)
        span = request.query_params.get("span", "hour")
        if span not in ("hour", "day"):
            raise HttpError(400, "span must be hour or day", "invalid_value", "span")
        await self.board.reading()  # as for requests: their tokens are counted with each reading
        history = self._view.history
        return _json({"span": span, "step_s": history.step_s(span), "steps": history.steps(span)})

    async def _namespaces(self, request: Request) -> Response:
        self._reader(request)
        reading = await self.board.new_reading()
        is_cut = reading.num_namespaces > len(reading.namespaces)
        return _json({"namespaces": reading.namespaces, "is_cut": is_cut})

    async def _requests(self, request: Request) -> Response:
        self._reader(request)
        await self.board.reading()  # a cache server's own page fills its log with each reading
        limit = _number(request, "limit", _DEFAULT_REQUESTS, MAX_LOGGED_REQUESTS)
        log = self._view.log
        return _json({"run": log.run, "requests": log.newest(limit), "is_cut": len(log) > limit})

    async def _request(self, request: Request) -> Response:
        """Why no more of a request was cached. Text is shown to the request's own key and to admins only."""
        tenant = self._reader(request)
        request_id: str = request.path_params["request_id"]
        if len(request_id) > _MAX_ID_CHARACTERS:
            raise HttpError(404, "the request id is too long", "unknown_request")
        logged = self._view.log.get(request_id)
        is_own = logged is not None and logged.key == tenant.name
        found = await self._view.explain(request_id, with_text=tenant.is_admin or is_own)
        if found is None:
            raise HttpError(404, "the request is unknown or no longer kept", "unknown_request")
        return _json(found)

    async def _warnings(self, request: Request) -> Response:
        self._reader(request)
        return _json({"warnings": await self._view.warnings()})

    async def _events(self, request: Request) -> Response:
        """Server-sent events `state` and `requests`, every few seconds."""
        self._reader(request)
        events = self.hub.events(self._still_allowed(request))
        await anext(events)
        return StreamedAnswer(events, media_type="text/event-stream")

    def _still_allowed(self, request: Request) -> Callable[[], bool]:
        """Whether the session that opened a stream is still valid: the stream ends with it."""
        if self._guard.session(request.scope) is None:
            return lambda: True
        session_id = self._guard.session_id(request.scope)
        return lambda: self._sessions.get(session_id) is not None

    def _reader(self, request: Request) -> ApiTenant:
        """Raises `HttpError` for a key without access to the page."""
        return self._access.reader(request)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _set_cookie(request: Request, response: Response, session_id: str, max_age_s: int) -> None:
    response.set_cookie(
        cookie_name(request.scope),
        session_id,
        max_age=max_age_s,
        path="/",
        secure=request.scope.get("scheme") == "https",
        httponly=True,
        samesite="strict",
    )


async def _small_body(request: Request) -> bytes:
    body = b""
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_PAGE_BODY_BYTES:
                    raise HttpError(413, "the body is larger than a log-in can be", "body_too_large")
    except TimeoutError as error:
        raise HttpError(408, "the body did not arrive in time", "timeout") from error
    return body


def _number(request: Request, name: str, default: int, most: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= most):
        raise HttpError(400, f"{name} must be a number from 1 to {most}", "invalid_value", name)
    return int(given)
