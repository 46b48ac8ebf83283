"""Who may ask, and whose blocks their prompts share."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from kvtier.api.config import ApiKey
from kvtier.api.http_error import HttpError, WrongKey


@dataclass(frozen=True, slots=True)
class Tenant:
    """The holder of a key, by its `name` in the deployment's file; without keys everybody is one without a name."""

    name: str
    salt: str = ""
    reads_metrics: bool = False


_EVERYBODY = Tenant("", reads_metrics=True)


class Access:
    """With keys, only their holders are served."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(one.key.encode(), Tenant(one.name, _salt_of_key(one), one.metrics)) for one in keys]

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
            kind_of_error, sentence = HttpError, "an API key is needed: Authorization: Bearer KEY"
            if given:
                kind_of_error, sentence = WrongKey, "the API key is not known here"
            raise kind_of_error(401, sentence, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found


def _salt_of_key(key: ApiKey) -> str:
    """Keys share no blocks unless the file says so: how fast an answer comes would tell what others have asked.

    The salt is of the key's name, so a new secret finds what the old one has cached; no salt of a file begins so.
    """
    return key.salt or ("" if key.share else f"\0key {key.name}")


def salt_of(tenant: Tenant, cache_salt: str) -> str:
    """Of the tenant's and the request's own salt one that no other pair gives."""
    if not tenant.salt and not cache_salt:
        return ""
    return f"{len(tenant.salt)}:{tenant.salt}{cache_salt}"
