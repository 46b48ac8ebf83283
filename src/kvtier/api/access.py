"""API keys: which clients are served, and which of them share blocks."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request

from kvtier.api.config import ApiKey
from kvtier.api.http_error import HttpError, WrongKey
from kvtier.api.retention import ANYTHING, RetentionRules


@dataclass(frozen=True, slots=True)
class ApiTenant:
    """The holder of a key, with the key's `name` in the deployment file. Without keys, all clients are one tenant."""

    name: str
    salt: str = ""
    reads_metrics: bool = False
    is_admin: bool = False
    retention: RetentionRules = ANYTHING


_WITHOUT_KEYS = ApiTenant("", reads_metrics=True, is_admin=True)
LOGGED_IN = "kvtier.tenant"
"""In a request's scope: its tenant, if a session of the page identifies it (`api/page/guard`)."""


class Access:
    """Finds the tenant of a request. With keys, only their holders are served."""

    def __init__(self, keys: Sequence[ApiKey], retention: RetentionRules = ANYTHING) -> None:
        """`retention` applies to clients without rules of their own."""
        self._without_keys = replace(_WITHOUT_KEYS, retention=retention)
        self._keys = [
            (
                one.key.encode(),
                ApiTenant(
                    one.name, _salt_of_key(one), one.metrics or one.admin, one.admin, _retention_of(one, retention)
                ),
            )
            for one in keys
        ]

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    def tenant(self, request: Request) -> ApiTenant:
        """Raises `HttpError` for a request without a known key."""
        if not self._keys:
            return self._without_keys
        logged_in: ApiTenant | None = request.scope.get(LOGGED_IN)
        return self.holder(_given_key(request)) if logged_in is None else logged_in

    def holder(self, given: str) -> ApiTenant:
        """The tenant of a key. Raises `HttpError` for an empty key, and `WrongKey` for an unknown one."""
        found: ApiTenant | None = None
        for key, tenant in self._keys:  # compare with all: the time must not reveal how close a guess is
            if hmac.compare_digest(key, given.encode()):
                found = tenant
        if found is None:
            kind_of_error, sentence = HttpError, "an API key is required: Authorization: Bearer KEY"
            if given:
                kind_of_error, sentence = WrongKey, "the API key is unknown"
            raise kind_of_error(401, sentence, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found

    def admin(self, request: Request) -> ApiTenant:
        """The tenant of a request that changes what is cached. Raises `HttpError` for a key without `admin`, too."""
        tenant = self.tenant(request)
        check_admin(tenant)
        return tenant

    def reader(self, request: Request) -> ApiTenant:
        """The tenant of a request for data about all keys. Raises `HttpError` for a key without `metrics`, too."""
        tenant = self.tenant(request)
        check_reader(tenant)
        return tenant

    @property
    def tenants(self) -> list[ApiTenant]:
        return [tenant for _, tenant in self._keys] or [_WITHOUT_KEYS]

    def tenant_named(self, name: str) -> ApiTenant | None:
        """The tenant whose key has this name. Without keys, the only tenant has the empty name."""
        if not self._keys:
            return None if name else _WITHOUT_KEYS
        return next((tenant for _, tenant in self._keys if tenant.name == name), None)


def check_admin(tenant: ApiTenant) -> None:
    """Raises `HttpError` for a key that may not change what is cached."""
    if not tenant.is_admin:
        raise HttpError(403, "this API key may not change what is cached: it needs admin: true", "no_admin")


def check_reader(tenant: ApiTenant) -> None:
    """Raises `HttpError` for a key that may not read data about all keys."""
    if not tenant.reads_metrics:
        raise HttpError(403, "this API key may not read the server's state: it needs metrics: true", "no_metrics")


def _given_key(request: Request) -> str:
    """The key in a request's headers, as OpenAI's or as Anthropic's clients send it."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and given.strip():
        return given.strip()
    return request.headers.get("x-api-key", "").strip()


def _salt_of_key(key: ApiKey) -> str:
    """Keys share no blocks unless the file says so: response times would reveal what other keys have asked.

    The salt is made of the key's name, so a new secret finds what the old one has cached. No salt in a file begins with
    a zero character.
    """
    return key.salt or ("" if key.share else f"\0key {key.name}")


def _retention_of(key: ApiKey, usual: RetentionRules) -> RetentionRules:
    default_s = usual.default_s if key.retention_s is None else key.retention_s
    return RetentionRules(default_s, usual.priority, key.retained_bytes)


def salt_of(tenant: ApiTenant, cache_salt: str) -> str:
    """Combine the tenant's and the request's own salt; different pairs give different results."""
    if not tenant.salt and not cache_salt:
        return ""
    return f"{len(tenant.salt)}:{tenant.salt}{cache_salt}"
