"""The client of a connector's or tier's cache server: the one its settings name, or the embedded one."""

from __future__ import annotations

from typing import Protocol

from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.client.connecting import connect
from kvtier.plugins.embedded_server import EmbeddedServer
from kvtier.plugins.vllm.settings import ServerSettings


class Cached(Protocol):
    """The blocks' layout, their namespace and the model's name."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def fields(self) -> NamespaceFields: ...

    @property
    def name(self) -> str: ...


def client_of(settings: ServerSettings, cached: Cached, server: EmbeddedServer | None) -> CacheClient:
    """A client of the server that the settings name, or else of `server`, which is started if it is not running."""
    if server is not None:
        server.ensure()
    address = settings.server if server is None else server.address
    assert address is not None
    return connect(
        address,
        layout=cached.layout,
        namespace=cached.fields,
        name=cached.name,
        token=settings.token(),
        secret=settings.secret(),
        ca_file=settings.ca_file,
        certificate=settings.certificate,
        key=settings.key,
        timeout_s=settings.timeout_s,
        must_answer=False,
        takes_declines=True,
    )
