"""A namespace as a server describes it in its `info`."""

from __future__ import annotations

import msgspec

from kvtier.blocks.namespace import NAMESPACE_BYTES, Namespace
from kvtier.errors import TierUnavailable


class KnownNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """`digest` is in hex; `fields` is what it covers (see `NamespaceFields.document`), None if nobody has said it."""

    digest: str = msgspec.field(name="namespace")
    name: str
    block_tokens: int
    block_bytes: int = 0
    blocks: int = 0
    disk_blocks: int = 0
    tenant: str = ""
    fields: dict[str, object] | None = None

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.digest)) != NAMESPACE_BYTES or self.block_tokens <= 0:
            raise ValueError("a namespace has 32 bytes, and blocks of at least one token")

    @property
    def namespace(self) -> Namespace:
        return Namespace(bytes.fromhex(self.digest))


def read_namespaces(described: list[dict[str, object]]) -> list[KnownNamespace]:
    """As a server describes them. Raises `TierUnavailable` if it does so in another way."""
    try:
        return msgspec.convert(described, list[KnownNamespace])
    except msgspec.ValidationError as error:
        raise TierUnavailable(f"the server describes its namespaces in a way unknown here: {error}") from error
