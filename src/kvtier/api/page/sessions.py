"""Log-ins to the page: a random id in a cookie stands for an API key. One event loop; bounded.

EventSource sends no Authorization header, so a browser needs a cookie; the key itself never leaves this process.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.api.access import ApiTenant
from kvtier.api.limits import MAX_PAGE_SESSIONS, MAX_PAGE_SESSIONS_OF_KEY, PAGE_SESSION_S

_ID_BYTES = 32
_MAX_ID_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Session:
    """A log-in. A request that changes something must carry `csrf`, which only this server's page can read."""

    tenant: ApiTenant
    csrf: str
    ends_at: float

    def knows(self, csrf: str) -> bool:
        return hmac.compare_digest(self.csrf.encode(), csrf.encode())


class Sessions:
    """The open sessions. Only digests of their ids are kept."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: OrderedDict[bytes, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, tenant: ApiTenant) -> tuple[str, Session]:
        """A new session and its id. If there are too many, the oldest one ends."""
        own = [digest for digest, session in self._open.items() if session.tenant.name == tenant.name]
        if len(own) >= MAX_PAGE_SESSIONS_OF_KEY:
            del self._open[own[0]]
        while len(self._open) >= MAX_PAGE_SESSIONS:
            self._open.popitem(last=False)
        session_id = secrets.token_urlsafe(_ID_BYTES)
        session = Session(tenant, secrets.token_urlsafe(_ID_BYTES), self._clock() + PAGE_SESSION_S)
        self._open[_digest(session_id)] = session
        return session_id, session

    def get(self, session_id: str) -> Session | None:
        """The session of an id; None if unknown or expired."""
        if not session_id or len(session_id) > _MAX_ID_CHARACTERS:
            return None
        session = self._open.get(_digest(session_id))
        if session is not None and session.ends_at <= self._clock():
            self.end(session_id)
            return None
        return session

    def end(self, session_id: str) -> None:
        self._open.pop(_digest(session_id), None)


def _digest(session_id: str) -> bytes:
    return hashlib.sha256(session_id.encode()).digest()
