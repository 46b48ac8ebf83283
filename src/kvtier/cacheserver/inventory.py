"""Read-only views of what a server holds, for people and metrics: levels, namespaces and their blocks. Thread-safe."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection

from kvtier.blocks.block import Block
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.namespace_document import read_fields
from kvtier.blocks.pool import BlockPool
from kvtier.cacheserver.cluster_below import SharedCluster
from kvtier.cacheserver.namespaces import MemorySpace, Namespaces
from kvtier.cacheserver.persistence import Disk, listed_on_disk
from kvtier.cacheserver.served_client import ServedClient
from kvtier.cacheserver.tenants import Tenant, Tenants
from kvtier.wire.messages import LISTED_MEMORY, LISTED_PINNED

MAX_DESCRIBED = 1000
"""Most namespaces on one page."""


class Inventory:
    """Reads the catalog's state under its lock."""

    def __init__(
        self,
        lock: threading.Lock,
        pool: BlockPool,
        namespaces: Namespaces,
        clients: Collection[ServedClient],
        tenants: Tenants,
        disk: Disk,
        cluster: SharedCluster,
        num_altered: Callable[[], int],
        max_pinned_units: int | None,
    ) -> None:
        """`max_pinned_units` is the limit for pins in memory of clients without a quota; None if memory has no pins."""
        self._lock = lock
        self._pool = pool
        self._namespaces = namespaces
        self._clients = clients
        self._tenants = tenants
        self._disk = disk
        self._cluster = cluster
        self._num_altered = num_altered
        self._max_pinned_units = max_pinned_units

    def list_blocks(self, space: MemorySpace, first: int, count: int) -> tuple[list[BlockHash], bytes, bool]:
        """At most `count` hashes of a namespace from position `first`, their LISTED_ flags, and whether it ends there.

        A client that lists part by part may miss blocks that come or go between its calls.
        """
        with self._lock:
            blocks = space.index.blocks.copy()
            stored = self._disk.blocks(space)
        pinned = dict(stored)
        only_stored = [block_hash for block_hash in pinned if block_hash not in blocks]
        listed = itertools.islice(itertools.chain(blocks, only_stored), first, first + count)
        flags = {each: flags_of(blocks.get(each)) | listed_on_disk(pinned.get(each)) for each in listed}
        found = {block_hash: each for block_hash, each in flags.items() if each}
        return list(found), bytes(found.values()), first + count >= len(blocks) + len(only_stored)

    def levels(self) -> dict[str, float]:
        """The server's gauges, and its counts of evicted and altered blocks."""
        with self._lock:
            pool = self._pool
            clients = self._clients
            spaces = list(self._namespaces)
            levels = {
                **self._disk.levels(),
                **self._cluster.levels(),
                "memory_bytes": pool.num_units * SLOT_ALIGN_BYTES,
                "used_bytes": (pool.num_units - pool.free_units) * SLOT_ALIGN_BYTES,
                "free_bytes": pool.free_units * SLOT_ALIGN_BYTES,
                "held_bytes": pool.referenced_units * SLOT_ALIGN_BYTES,
                "pinned_bytes": pool.pinned_units * SLOT_ALIGN_BYTES,
                "retained_bytes": pool.retained_units() * SLOT_ALIGN_BYTES,
                "namespaces": len(spaces),
                "clients": len(clients),
                "leases": sum(len(client.leases) for client in clients),
                "reservations": sum(len(client.reservations) for client in clients),
                "evicted_blocks": pool.num_evicted,
                "altered_blocks": self._num_altered(),
                **self._pinnable(self._tenants.owner),
            }
        levels["blocks"] = sum(len(space.index) for space in spaces)  # without the lock: there may be very many
        return levels

    def levels_of(self, tenant: Tenant) -> dict[str, float]:
        """One tenant's usage and quotas."""
        with self._lock:
            clients = [client for client in self._clients if client.tenant is tenant]
            memory, disk = tenant.memory, tenant.disk
            return {
                "used_bytes": memory.used * SLOT_ALIGN_BYTES,
                "quota_bytes": memory.quota * SLOT_ALIGN_BYTES,
                "pinned_bytes": memory.pinned * SLOT_ALIGN_BYTES,
                **self._pinnable(tenant),
                "retained_bytes": self._pool.retained_units(memory) * SLOT_ALIGN_BYTES,
                "held_bytes": sum(client.held_units for client in clients) * SLOT_ALIGN_BYTES,
                "disk_used_bytes": disk.used * SLOT_ALIGN_BYTES,
                "disk_quota_bytes": disk.quota * SLOT_ALIGN_BYTES,
                "clients": len(clients),
                "leases": sum(len(client.leases) for client in clients),
                "reservations": sum(len(client.reservations) for client in clients),
            }

    def _pinnable(self, tenant: Tenant) -> dict[str, float]:
        """How much more may be pinned in memory; nothing if pinned blocks leave memory for the disk anyway."""
        if self._max_pinned_units is None:
            return {}
        share = tenant.memory
        most = self._max_pinned_units if share.max_pinned is None else share.max_pinned
        now = share.pinned if self._tenants.has_several else self._pool.pinned_units
        return {"pinnable_bytes": max(0, most - now) * SLOT_ALIGN_BYTES}

    def tenant_levels(self) -> dict[str, dict[str, float]]:
        """The levels of each tenant by name, if there are several; the owner's name is empty."""
        return {tenant.name: self.levels_of(tenant) for tenant in self._tenants} if self._tenants.has_several else {}

    def spaces(self, asker: Tenant | None = None, first: int = 0) -> list[dict[str, object]]:
        """A page of the namespaces in memory or on disk that `asker` may see, from position `first`, for people."""
        with self._lock:
            return list(self._page(asker, first).values())

    def spaces_with_fields(self, asker: Tenant | None = None, first: int = 0) -> list[dict[str, object]]:
        """Like `spaces`, each with the fields that its namespace covers, or None if unknown."""
        with self._lock:
            get = self._namespaces.descriptions.get
            found = [(each, get(namespace)) for namespace, each in self._page(asker, first).items()]
        return [{**each, "fields": None if text is None else read_fields(text)} for each, text in found]

    def known_spaces(self, asker: Tenant, first: int) -> list[dict[str, object]]:
        """As `spaces_with_fields`; behind the last of them come those that only other hosts have, for an owner."""
        page = self.spaces_with_fields(asker, first)
        is_last = len(page) < MAX_DESCRIBED and (page or not first)
        return page + self._spaces_elsewhere() if is_last and asker.sees_all else page

    def fields_of(self, space: MemorySpace) -> str | None:
        """What its namespace covers, in JSON, if a client has said so."""
        with self._lock:
            return self._namespaces.descriptions.get(space.namespace)

    def _spaces_elsewhere(self) -> list[dict[str, object]]:
        """May wait for the cluster."""
        described = self._cluster.described()
        with self._lock:
            elsewhere = [each for each in described if not self._has(each.namespace)]
        return [
            {
                "namespace": each.namespace.hex(),
                "name": each.name,
                "block_tokens": each.block_tokens,
                "fields": each.fields,
                "is_elsewhere": True,
            }
            for each in elsewhere
        ]

    def _has(self, namespace: Namespace) -> bool:
        """Under the lock."""
        return self._namespaces.get(namespace) is not None or self._disk.stored_space(namespace) is not None

    def _page(self, asker: Tenant | None, first: int) -> dict[Namespace, dict[str, object]]:
        """A page of namespaces; called under the lock."""
        asker = self._tenants.owner if asker is None else asker
        return self._namespaces.describe(self._disk.spaces, self._disk.stored_space, asker, first, MAX_DESCRIBED)


def flags_of(block: Block | None) -> int:
    if block is None or not block.is_ready:
        return 0
    return LISTED_MEMORY | (LISTED_PINNED if block.is_pinned else 0)
