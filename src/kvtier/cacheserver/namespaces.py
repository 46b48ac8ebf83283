"""The namespaces of a server, with their blocks in memory. Guarded by the catalog's lock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from kvtier.blocks.block import Block, PrefixIndex
from kvtier.blocks.ghosts import scope_of
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES, slot_bytes_of
from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver.namespace_descriptions import NamespaceDescriptions
from kvtier.cacheserver.tenants import Tenant, split_tagged
from kvtier.errors import TierRefused
from kvtier.sizes import format_size
from kvtier.stores.stored_block import StoreSpace

Hashes: TypeAlias = Sequence[BlockHash]
StoredSpace: TypeAlias = Callable[[Namespace], StoreSpace | None]
"""Finds the disk's record of a namespace."""

MAX_NAMESPACES = 1 << 17
MAX_TENANT_NAMESPACES = 1 << 13
SWEPT_AT_ONCE = 1024


class MemoryBlock(Block):
    """A block in the arena. `is_stored`: it is on disk too. `is_queued`: it waits to be written. `is_wanted`: it was
    queued once.

    `shared_at` is when the block was last known to be in the cluster; `is_sharing`: it has been on its way there since
    `tried_at`. `checksum` covers key and payload, once computed; `client_checksum` does so with the tenant's own id of
    the namespace. `reused_in` is set while the block is read from disk for a client that reuses it in that space.
    """

    __slots__ = (
        "checksum",
        "client_checksum",
        "is_queued",
        "is_sharing",
        "is_stored",
        "is_wanted",
        "reused_in",
        "shared_at",
        "tried_at",
    )

    def __init__(self, start: int, size: int) -> None:
        super().__init__(start, size)
        self.checksum: int | None = None
        self.client_checksum: int | None = None
        self.is_stored = False
        self.is_queued = False
        self.is_wanted = False
        self.is_sharing = False
        self.shared_at = -math.inf
        self.tried_at = -math.inf
        self.reused_in: MemorySpace | None = None


class MemorySpace:
    """One namespace's blocks in memory. `num_users` connections have it open.

    `namespace` is the server's id of it, `client_namespace` the tenant's; `stored_name` is its name on disk. A space
    that `is_awaited` was opened only by clients that may not write: it does not exist on disk.
    """

    def __init__(
        self,
        number: int,
        tenant: Tenant,
        namespace: Namespace,
        client_namespace: Namespace,
        name: str,
        block_bytes: int,
        block_tokens: int,
    ) -> None:
        self.number = number
        self.tenant = tenant
        self.namespace = namespace
        self.client_namespace = client_namespace
        self.name = name
        self.stored_name = tenant.tagged(name)
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.index = PrefixIndex(slot_bytes_of(block_bytes) // SLOT_ALIGN_BYTES, tenant.memory, scope_of(namespace))
        self.num_users = 0
        self.is_awaited = False
        self.asking = 0
        """The kind of lookup that clients use (`traffic.Asking`)."""

    def begin(self, name: str, block_tokens: int) -> None:
        """A client that may write opened a space that readers awaited: its description of the namespace counts."""
        self.name = name
        self.stored_name = self.tenant.tagged(name)
        self.block_tokens = block_tokens
        self.is_awaited = False

    def is_table(self, block: Block) -> bool:
        """Whether `block` is a table that processes of this host keep writing to (`vineyard/recency`), not a prompt's.

        A table's hash is the namespace's own digest, which no prompt's block has.
        """
        return bytes(block.hash) == self.namespace


class Namespaces:
    """All namespaces that are open or have blocks in memory. A number is never used twice.

    A namespace opened only by readers is kept apart: it has no blocks, and no other client sees it. Its readers get
    blocks once a client that may write opens it with the same block size.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._numbers = itertools.count(1)
        self._spaces: dict[Namespace, MemorySpace] = {}
        self._of_tenant: dict[Tenant, dict[Namespace, MemorySpace]] = {}
        self._to_sweep: list[MemorySpace] = []
        self._awaited: dict[tuple[Namespace, int], MemorySpace] = {}
        self.descriptions = NamespaceDescriptions()

    def __len__(self) -> int:
        return len(self._spaces)

    def __iter__(self) -> Iterator[MemorySpace]:
        return iter(self._spaces.values())

    def get(self, namespace: Namespace) -> MemorySpace | None:
        return self._spaces.get(namespace)

    def open(
        self,
        tenant: Tenant,
        namespace: Namespace,
        client_namespace: Namespace,
        name: str,
        block_bytes: int,
        block_tokens: int,
        fields: str,
        *,
        may_make: bool = True,
    ) -> MemorySpace:
        """Open the space of `namespace`; a new one belongs to `tenant`."""
        space = self._spaces.get(namespace)
        if space is None:
            space = self._awaited.get((namespace, block_bytes))
            if space is None:
                self._check_room(tenant, block_bytes)
                number = next(self._numbers)
                space = MemorySpace(number, tenant, namespace, client_namespace, name, block_bytes, block_tokens)
            if may_make:
                self._awaited.pop((namespace, block_bytes), None)
                space.begin(name, block_tokens)
                self._spaces[namespace] = space
                self._of_tenant.setdefault(space.tenant, {})[namespace] = space
            else:
                space.is_awaited = True
                self._awaited[namespace, block_bytes] = space
        if space.block_bytes != block_bytes:
            raise TierRefused(
                f"namespace {namespace.hex()[:12]} ({space.name or 'unnamed'}) has blocks of {space.block_bytes} "
                f"bytes here; this client's have {block_bytes}"
            )
        space.num_users += 1
        if fields and may_make:
            self.descriptions.keep(namespace, fields, space.tenant.name)
        return space

    def _check_room(self, tenant: Tenant, block_bytes: int) -> None:
        """Raises `TierRefused` if `tenant` may have no further namespace, or none with blocks of this size."""
        if slot_bytes_of(block_bytes) > self._memory_bytes:
            raise TierRefused(
                f"a block of {format_size(block_bytes)} does not fit into this server's memory of "
                f"{format_size(self._memory_bytes)}"
            )
        limit = MAX_TENANT_NAMESPACES if tenant.name else MAX_NAMESPACES
        if len(self._of_tenant.get(tenant, ())) >= limit:
            raise TierRefused(f"{limit} namespaces are in use or have blocks in memory, which is the limit")

    def forget_if_empty(self, space: MemorySpace) -> None:
        if space.num_users or len(space.index):
            return
        if space.is_awaited:
            self._awaited.pop((space.namespace, space.block_bytes), None)
        elif self._spaces.get(space.namespace) is space:
            del self._spaces[space.namespace]
            of_tenant = self._of_tenant[space.tenant]
            del of_tenant[space.namespace]
            if not of_tenant:
                del self._of_tenant[space.tenant]

    def forget_unused(self, stored_space: StoredSpace) -> None:
        """Forget namespaces that are not open and have no blocks. A call checks a part; successive calls check all."""
        if not self._to_sweep:
            self._to_sweep = list(self._spaces.values())
        for space in self._to_sweep[-SWEPT_AT_ONCE:]:
            self.forget_if_empty(space)
        del self._to_sweep[-SWEPT_AT_ONCE:]

        def is_known(namespace: Namespace) -> bool:
            return namespace in self._spaces or _num_stored(stored_space(namespace)) > 0

        self.descriptions.forget_unless(is_known, SWEPT_AT_ONCE)

    def describe(
        self,
        stored: Callable[[], Iterable[StoreSpace]],
        stored_space: StoredSpace,
        asker: Tenant,
        first: int,
        count: int,
    ) -> dict[Namespace, dict[str, object]]:
        """The namespaces in memory or among the `stored` that `asker` may see, at most `count` from `first` on."""
        own = self._spaces if asker.sees_all else self._of_tenant.get(asker, {})
        page = {
            space.namespace: _described(space, stored_space(space.namespace), asker)
            for space in itertools.islice(own.values(), first, first + count)
        }
        if len(page) < count:
            others = (
                space
                for space in stored()
                if space.namespace not in own and (asker.sees_all or split_tagged(space.name)[0] == asker.name)
            )
            skipped = max(0, first - len(own))
            for space in itertools.islice(others, skipped, skipped + count - len(page)):
                page[space.namespace] = _described(None, space, asker)
        return page


def _num_stored(stored: StoreSpace | None) -> int:
    return 0 if stored is None else len(stored.index)


def _described(space: MemorySpace | None, stored: StoreSpace | None, asker: Tenant) -> dict[str, object]:
    known = stored if space is None else space
    assert known is not None
    num_blocks = 0 if space is None else len(space.index)
    namespace = known.namespace if space is None or asker.sees_all else space.client_namespace
    tenant, name = split_tagged(known.name) if space is None else (space.tenant.name, space.name)
    return {
        "namespace": namespace.hex(),
        "name": name,
        **({"tenant": tenant} if tenant else {}),
        "block_bytes": known.block_bytes,
        "block_tokens": known.block_tokens,
        "blocks": num_blocks,
        "used_bytes": num_blocks * slot_bytes_of(known.block_bytes),
        "connections": 0 if space is None else space.num_users,
        "disk_blocks": _num_stored(stored),
    }
