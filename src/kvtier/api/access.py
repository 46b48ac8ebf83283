"""Which clients may ask, and which of them share blocks."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request

from kvtier.api.config import ApiKey
from kvtier.api.http_error import HttpError, WrongKey
from kvtier.api.retention import ANYTHING, RetentionRules


@dataclass(frozen=True, slots=True)
class Tenant:
    """The holder of a key, by its `name` in the deployment's file; without keys all clients are one unnamed tenant."""

    name: str
    salt: str = ""
    reads_metrics: bool = False
    is_admin: bool = False
    retention: RetentionRules = ANYTHING


_EVERYBODY = Tenant("", reads_metrics=True, is_admin=True)
LOGGED_IN = "kvtier.tenant"
"""In the scope of a request: who asks, where a session of the page tells that (`api/page/guard`)."""


class Access:
    """With keys, only their holders are served."""

    def __init__(self, keys: Sequence[ApiKey], retention: RetentionRules = ANYTHING) -> None:
        """`retention` is for clients without rules of their own."""
        self._everybody = replace(_EVERYBODY, retention=retention)
        self._keys = [
            (
                one.key.encode(),
                Tenant(one.name, _salt_of_key(one), one.metrics or one.admin, one.admin, _retention_of(one, retention)),
            )
            for one in keys
        ]

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    def tenant(self, request: Request) -> Tenant:
        """Raises a `HttpError` for a request without a key that is known."""
        if not self._keys:
            return self._everybody
        logged_in: Tenant | None = request.scope.get(LOGGED_IN)
        return self.holder(_given_key(request)) if logged_in is None else logged_in

    def holder(self, given: str) -> Tenant:
        """Of a key. Raises a `HttpError` for none, and for one that is not known."""
        found: Tenant | None = None
        for key, tenant in self._keys:  # all of them: the time must not tell which one is near
            if hmac.compare_digest(key, given.encode()):
                found = tenant
        if found is None:
            kind_of_error, sentence = HttpError, "an API key is needed: Authorization: Bearer KEY"
            if given:
                kind_of_error, sentence = WrongKey, "the API key is not known here"
            raise kind_of_error(401, sentence, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found

    def admin(self, request: Request) -> Tenant:
        """As `tenant`, for a request that changes what is cached. Raises a `HttpError` for a key that may not."""
        tenant = self.tenant(request)
        check_admin(tenant)
        return tenant

    def reader(self, request: Request) -> Tenant:
        """As `tenant`, for a request that looks at what all keys do. Raises a `HttpError` for a key that may not."""
        tenant = self.tenant(request)
        check_reader(tenant)
        return tenant

    @property
    def tenants(self) -> list[Tenant]:
        return [tenant for _, tenant in self._keys] or [_EVERYBODY]

    def tenant_called(self, name: str) -> Tenant | None:
        """Whose key has this name; without keys everybody, who has none."""
        if not self._keys:
            return None if name else _EVERYBODY
        return next((tenant for _, tenant in self._keys if tenant.name == name), None)


def check_admin(tenant: Tenant) -> None:
    """Raises a `HttpError` for a key that may not change what is cached."""
    if not tenant.is_admin:
        raise HttpError(403, "this API key may not change what is cached: give it admin: true", "no_admin")


def check_reader(tenant: Tenant) -> None:
    """Raises a `HttpError` for a key that may not look at what all keys do."""
    if not tenant.reads_metrics:
        raise HttpError(403, "this API key may not look at the server: give it metrics: true", "no_metrics")


def _given_key(request: Request) -> str:
    """A key comes as OpenAI's clients send it, or as Anthropic's do."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and given.strip():
        return given.strip()
    return request.headers.get("x-api-key", "").strip()


def _salt_of_key(key: ApiKey) -> str:
    """Keys share no blocks unless the file says so: how fast an answer comes would tell what others have asked.

    The salt is of the key's name, so a new secret finds what the old one has cached; no salt of a file begins so.
    """
    return key.salt or ("" if key.share else f"\0key {key.name}")


def _retention_of(key: ApiKey, usual: RetentionRules) -> RetentionRules:
    default_s = usual.default_s if key.retention_s is None else key.retention_s
    return RetentionRules(default_s, usual.priority, key.retained_bytes)


def salt_of(tenant: Tenant, cache_salt: str) -> str:
    """Of the tenant's and the request's own salt one that no other pair gives."""
    if not tenant.salt and not cache_salt:
        return ""
    return f"{len(tenant.salt)}:{tenant.salt}{cache_salt}"
