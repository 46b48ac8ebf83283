"""`connect`: from an address to a client."""

from __future__ import annotations

from pathlib import Path

from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace, NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.client.options import DEFAULT_TRANSFER_CONNECTIONS, ClientOptions
from kvtier.errors import ConfigError, TierError, TierRefused
from kvtier.observe.metrics import TierMetrics
from kvtier.transport.address import check_is_one, parse_address
from kvtier.wire.messages import MAX_FIELDS_CHARS


def connect(
    address: str,
    *,
    layout: KvLayout | None = None,
    namespace: Namespace | NamespaceFields | None = None,
    name: str = "",
    token: str | bytes | None = None,
    secret: str | bytes | None = None,
    ca_file: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    timeout_s: float = 1.0,
    max_connections: int = 8,
    transfer_connections: int = DEFAULT_TRANSFER_CONNECTIONS,
    metrics: TierMetrics | None = None,
    must_answer: bool = True,
    takes_declines: bool = False,
) -> CacheClient:
    """A client of the cache server at `unix:/path` or `tcp://host:port`.

    `layout` is the shape of a block and `namespace` its namespace; `name` is shown in `stats`. Over TCP, a `token` is
    needed, or a `certificate` with its `key`; `ca_file` turns TLS on, and `secret` encrypts without TLS if the server
    has the same. Raises `ConfigError` for impossible settings and `TierRefused` if the server refuses this client. With
    `must_answer`, raises `TierUnavailable` or `TierTimeout` if it does not answer now; without, the client finds
    nothing until it does. With `takes_declines`, as engines have it, a full server need not store a block that is less
    likely to be asked for than those it has.
    """
    check_is_one("connect()", address)
    options = ClientOptions(
        token=token.encode() if isinstance(token, str) else token,
        secret=secret.encode() if isinstance(secret, str) else secret,
        ca_file=Path(ca_file) if ca_file is not None else None,
        certificate=Path(certificate) if certificate is not None else None,
        key=Path(key) if key is not None else None,
        timeout_s=timeout_s,
        max_connections=max_connections,
        transfer_connections=transfer_connections,
        takes_declines=takes_declines,
    )
    client = CacheClient(
        parse_address(address),
        layout=layout,
        namespace=_namespace_of(namespace, layout),
        name=name,
        options=options,
        metrics=TierMetrics() if metrics is None else metrics,
        fields=_fields_text(namespace),
    )
    try:
        client.ping()
    except BaseException as error:
        if must_answer or not isinstance(error, TierError) or isinstance(error, TierRefused):
            client.close()
            raise
    return client


def _namespace_of(fields: Namespace | NamespaceFields | None, layout: KvLayout | None) -> Namespace | None:
    """The digest to use. Raises `ConfigError` if layout and namespace do not belong together."""
    if layout is None:
        if fields is not None:
            raise ConfigError("a namespace needs a layout: pass layout= too")
        return None
    if fields is None:
        raise ConfigError("blocks need a namespace: pass namespace=NamespaceFields(layout=..., weights=...)")
    if isinstance(fields, NamespaceFields):
        if fields.layout != layout:
            raise ConfigError("the namespace was made for another layout")
        return fields.digest()
    if len(fields) != 32:
        raise ConfigError(f"a namespace is a digest of 32 bytes, not {len(fields)}")
    return fields


def _fields_text(fields: Namespace | NamespaceFields | None) -> str:
    """A namespace's description for a server; empty if only its digest is known, or if it would be too long."""
    if not isinstance(fields, NamespaceFields):
        return ""
    text = fields.description()
    return text if len(text) <= MAX_FIELDS_CHARS else ""
