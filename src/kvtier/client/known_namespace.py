"""A namespace as described by a server in its `info`."""

from __future__ import annotations

import msgspec

from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NAMESPACE_BYTES, Namespace
from kvtier.errors import TierUnavailable


class KnownNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """`digest` is in hex; `fields` is what it covers (see `NamespaceFields.document`), None if unknown.

    One that `is_elsewhere` is known from the cluster alone: the server itself has none of its blocks.
    """

    digest: str = msgspec.field(name="namespace")
    name: str
    block_tokens: int
    block_bytes: int = 0
    blocks: int = 0
    disk_blocks: int = 0
    tenant: str = ""
    fields: dict[str, object] | None = None
    is_elsewhere: bool = False

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.digest)) != NAMESPACE_BYTES or self.block_tokens <= 0:
            raise ValueError("a namespace has 32 bytes, and blocks of at least one token")

    @property
    def namespace(self) -> Namespace:
        return Namespace(bytes.fromhex(self.digest))

    @property
    def any_layout(self) -> KvLayout:
        """A layout with blocks of the right size, for clients that do not look inside. The server shows its tokens."""
        tokens = self.block_tokens if self.block_bytes % (2 * self.block_tokens) == 0 else 1
        head_dim = self.block_bytes // tokens // 2
        return KvLayout(layers=1, kv_heads=1, block_tokens=tokens, head_dim=head_dim, dtype="float8_e4m3fn")


def read_namespaces(described: list[dict[str, object]]) -> list[KnownNamespace]:
    """The namespaces that a server describes. Raises `TierUnavailable` if their form is unknown."""
    try:
        return msgspec.convert(described, list[KnownNamespace])
    except msgspec.ValidationError as error:
        raise TierUnavailable(f"the server describes its namespaces in a way unknown here: {error}") from error
