"""Who may ask, and whose blocks their prompts share."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from kvtier.api.config import ApiKey
from kvtier.api.http_error import HttpError


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    salt: str = ""


_EVERYBODY = Tenant("")


class Access:
    """With keys, only their holders are served."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(one.key.encode(), Tenant(one.name, one.salt)) for one in keys]

    def tenant(self, request: Request) -> Tenant:
        """Raises a `HttpError` for a request without a key that is known."""
        if not self._keys:
            return _EVERYBODY
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        found: Tenant | None = None
        for key, tenant in self._keys:  # all of them: the time must not tell which one is near
            if hmac.compare_digest(key, given.strip().encode()):
                found = tenant
        if found is None or kind.lower() != "bearer":
            sentence = "the API key is not known here" if given else "an API key is needed: Authorization: Bearer KEY"
            raise HttpError(401, sentence, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found


def salt_of(tenant: Tenant, cache_salt: str) -> str:
    """Of the tenant's and the request's own salt one that no other pair gives."""
    if not tenant.salt and not cache_salt:
        return ""
    return f"{len(tenant.salt)}:{tenant.salt}{cache_salt}"
