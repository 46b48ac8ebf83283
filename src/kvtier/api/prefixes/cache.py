"""Finds, pins and drops blocks of prefixes in the models' cache servers. Calls block: make them from threads.

Each call has a connection of its own: calls are rare, so a server that is away in between does no harm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.api.config import CacheAddress
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import slot_bytes_of
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient
from kvtier.client.connecting import connect
from kvtier.client.known_namespace import KnownNamespace
from kvtier.client.room import Room, room_of
from kvtier.errors import TierError, TierRefused
from kvtier.wire.messages import LISTED_CACHED, LISTED_DISK, LISTED_MEMORY, LISTED_PINNED

_TIMEOUT_S = 30.0
MEMORY, DISK = "server", "disk"
"""Names of tiers, as in a request's usage."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the blocks of a prefix are: how many are cached in any tier, how many of these are pinned, bytes by tier.

    `slot_bytes` is the size of one block's slot; 0 while the server does not know the namespace. `first_absent` is the
    index of the first block that is not cached.
    """

    num_cached: int
    num_pinned: int
    slot_bytes: int
    bytes_by_tier: dict[str, int]
    first_absent: int


class NothingCached(TierRefused):
    """The server has no block of the namespace, and does not know it."""


class PrefixCache:
    """One cache server."""

    def __init__(self, address: CacheAddress) -> None:
        self.address = address.address
        self._given = address

    def namespaces(self) -> list[KnownNamespace]:
        """Raises `TierError` while the server does not answer."""
        with self._connect() as client:
            return client.namespaces()

    def place(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> Placed:
        """Raises `TierError` while the server does not answer."""
        return self.places([(namespace, hashes)])[0]

    def places(self, prefixes: Sequence[tuple[Namespace, Sequence[BlockHash]]]) -> list[Placed]:
        """Where several prefixes are, over one connection. Raises `TierError` while the server does not answer."""
        with self._connect() as client:
            found = [client.presence(namespace, hashes) for namespace, hashes in prefixes]
            known = client.namespaces()
        return [
            self._placed(flags, _find(known, namespace)) for (namespace, _), flags in zip(prefixes, found, strict=True)
        ]

    def _placed(self, flags: Sequence[int], known: KnownNamespace | None) -> Placed:
        slot_bytes = 0 if known is None else slot_bytes_of(known.block_bytes)
        in_memory = sum(1 for each in flags if each & LISTED_MEMORY)
        on_disk = sum(1 for each in flags if each & LISTED_DISK)
        cached = [bool(each & LISTED_CACHED) for each in flags]
        tiers = {MEMORY: in_memory * slot_bytes, DISK: on_disk * slot_bytes}
        return Placed(
            sum(cached),
            sum(1 for each in flags if each & LISTED_PINNED),
            slot_bytes,
            {tier: nbytes for tier, nbytes in tiers.items() if nbytes},
            cached.index(False) if False in cached else len(cached),
        )

    def room(self) -> Room:
        with self._connect() as client:
            return room_of(client.stats())

    def pin(self, namespace: Namespace, hashes: Sequence[BlockHash], *, keep: bool) -> int:
        """Pin or unpin blocks, on disk, too, so that a crash of the server changes nothing.

        Raises `TierRefused` if not all may be pinned; then all are pinned or not as before.
        """
        if not keep:
            with contextlib.suppress(NothingCached), self._opened(namespace) as client:
                return _flushed(client, client.unpin(hashes))
            return 0
        with self._opened(namespace) as client:
            before = client.presence(namespace, hashes)
            try:
                return _flushed(client, client.pin(hashes))
            except TierRefused:
                fresh = [one for one, flags in zip(hashes, before, strict=True) if not flags & LISTED_PINNED]
                if fresh:
                    client.unpin(fresh)
                raise

    def drop(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> int:
        with contextlib.suppress(NothingCached), self._opened(namespace) as client:
            client.unpin(hashes)
            return client.drop(hashes)
        return 0

    def drop_all(self, digest: str) -> int | None:
        """Drop all blocks of a namespace, pinned ones, too. None if the server does not know it."""
        known = next((one for one in self.namespaces() if one.digest == digest), None)
        if known is None:
            return None
        with self._connect(known) as client:
            return client.drop()

    def use(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> None:
        """Count a use of the blocks, for servers that only store reused blocks. Waits for the disk."""
        with self._opened(namespace) as client:
            client.match_lazily(hashes).release()
            client.flush()

    @contextmanager
    def _opened(self, namespace: Namespace) -> Iterator[CacheClient]:
        """A client that uses the namespace. Raises `NothingCached` if the server does not know it."""
        with self._connect() as client:
            known = _find(client.namespaces(), namespace)
        if known is None:
            raise NothingCached("the cache has no blocks of this model in its present form")
        with self._connect(known) as client:
            yield client

    def _connect(self, known: KnownNamespace | None = None) -> CacheClient:
        given = self._given
        return connect(
            given.address,
            layout=None if known is None else known.any_layout,
            namespace=None if known is None else known.namespace,
            name="" if known is None else known.name,
            token=given.token,
            secret=given.secret,
            ca_file=given.ca_file,
            certificate=given.certificate,
            key=given.key,
            timeout_s=_TIMEOUT_S,
        )


def _flushed(client: CacheClient, count: int) -> int:
    """`count`, once pins are on disk; a disk that is down does not keep the cache from pinning in memory."""
    with contextlib.suppress(TierError):
        client.flush()
    return count


def _find(known: Sequence[KnownNamespace], namespace: Namespace) -> KnownNamespace | None:
    return next((one for one in known if one.namespace == namespace), None)
