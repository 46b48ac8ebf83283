"""The client of one cache server: match, get, set and the rest, over shared memory or TCP. Thread-safe.

Calls on behalf of a request (match, get, stream_get, set, contains) never raise if the server is dead, slow or full:
they answer with less, and count why. Calls of an operator (info, stats, pin, drop, flush) raise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NoReturn, Self

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.prompt_share import prompt_share
from kvtier.blocks.retention import DEFAULT_PRIORITY, Granted
from kvtier.client.admin import AskedRetention, NamespaceAdmin, RequestNote, ServerAdmin
from kvtier.client.endpoint import Endpoint
from kvtier.client.known_namespace import KnownNamespace, read_namespaces
from kvtier.client.local import LocalBlocks
from kvtier.client.options import ClientOptions
from kvtier.client.remote import RemoteBlocks
from kvtier.errors import ConfigError, TierError, TierFull
from kvtier.memory.copying import Buffer, byte_views
from kvtier.memory.lease import Lease, Reservation
from kvtier.memory.mapped import MappedArena
from kvtier.observe.metrics import TierMetrics
from kvtier.transport.address import Address
from kvtier.wire import messages as wire
from kvtier.wire.frames import MAX_HASHES
from kvtier.workers import Workers

__all__ = ["CacheClient", "ClientOptions", "RequestNote"]

_FLUSH_S = 60.0


class CacheClient:
    """The client of one server. Without a layout, it can only be asked about the server and its contents.

    `hashes` are those of a prompt's blocks in order.
    """

    # As large as it is, since every call to a server is here; each is a line or two.

    def __init__(
        self,
        address: Address,
        *,
        layout: KvLayout | None,
        namespace: Namespace | None,
        name: str,
        options: ClientOptions,
        metrics: TierMetrics,
        fields: str = "",
    ) -> None:
        """`fields` is what `namespace` covers, as JSON, for users to read in the server's `info`."""
        opening = None
        if layout is not None and namespace is not None:
            opening = wire.Open(namespace, name, layout.block_bytes, layout.block_tokens, fields)
        endpoint = Endpoint(address, opening, options, metrics)
        self.address = address
        self.is_local = endpoint.is_local
        self.metrics = metrics
        self._layout = layout
        self._namespace = namespace
        self._endpoint = endpoint
        self._transfers = Workers(options.transfer_connections, "kvtier-transfer")
        self._server = ServerAdmin(endpoint)
        self._admin: NamespaceAdmin | None = None
        self._blocks: LocalBlocks | RemoteBlocks | None = None
        if layout is not None and namespace is not None:
            self._admin = NamespaceAdmin(endpoint, layout.block_bytes)
            if self.is_local:
                self._blocks = LocalBlocks(endpoint, layout.block_bytes)
            else:
                self._blocks = RemoteBlocks(endpoint, layout.block_bytes, namespace, self._transfers)

    # --- identity --------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> KvLayout:
        return self._layout or _no_layout()

    @property
    def is_up(self) -> bool:
        """The breaker is closed: the next call will be tried."""
        return not self._endpoint.breaker.is_open

    @property
    def has_disk(self) -> bool:
        """As reported by the server when a connection was made; False until then."""
        return self._endpoint.has_disk

    @property
    def most_prompt_blocks(self) -> int | None:
        """The most leading blocks of a prompt that are worth storing.

        None if the server keeps what leaves its memory, or if that memory is unknown: over TCP, or before a connection.
        """
        endpoint = self._endpoint
        if endpoint.has_disk or endpoint.places.has_cluster or not endpoint.memory_bytes:
            return None
        return prompt_share(endpoint.memory_bytes // self.layout.slot_bytes)

    @property
    def num_returns(self) -> int:
        """How often the server was away and came back, the same one or another."""
        return self._endpoint.background.num_returns

    @property
    def arena(self) -> MappedArena:
        """The server's memory as this process maps it: lease offsets are places in it, and CUDA registers it.

        After a restart of the server, it is another one. Raises `TierUnavailable` unless the server is on this host.
        """
        return self._endpoint.mapping.arena

    def hashes(self, tokens: Sequence[int]) -> list[BlockHash]:
        """The hashes of the full blocks of `tokens` in this client's namespace."""
        return block_hashes(self._namespace or _no_layout(), tokens, self.layout.block_tokens)

    def ping(self) -> None:
        """Raises a `TierError` if the server does not answer or refuses this client."""
        self._endpoint.call(wire.Ping(), wire.Done)

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """Report all hashes of a prompt so far, from its first block on. Never waits.

        For a server above a cluster, which finds blocks by their places: it is sent the place of part of a prompt.
        """
        self._endpoint.places.learn(hashes)

    # --- reading ---------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        """Lease the longest cached prefix. Empty, never an exception, if the server does not answer."""
        return (self._blocks or _no_layout()).match(hashes, timeout_s)

    def match_lazily(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        """Like `match`, but reads nothing from disk: leases blocks in memory, and counts those that could be read.

        A later match of exactly those blocks, or of some of them, reads and leases them.
        """
        return (self._blocks or _no_layout()).match(hashes, timeout_s, is_lazy=True)

    def get(self, hashes: Sequence[BlockHash], into: Sequence[Buffer], *, timeout_s: float | None = None) -> int:
        """Fill `into` with the longest cached prefix. Returns how many blocks; the rest of `into` is undefined."""
        return (self._blocks or _no_layout()).get(hashes[: len(into)], into, timeout_s)

    def stream_get(
        self, hashes: Sequence[BlockHash], into: Sequence[Buffer] | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        """The longest cached prefix a block at a time, as `(position, view)`, each as soon as it has arrived.

        The view is `into[position]`, filled; without `into` it is valid until the next step only.
        """
        blocks = self._blocks or _no_layout()
        if into is not None:
            hashes = hashes[: len(into)]
        buffers = None if into is None else byte_views(into[: len(hashes)], self.layout.block_bytes, writable=True)
        hashes = hashes[:MAX_HASHES]
        return blocks.stream(hashes, buffers) if hashes else iter(())

    def contains(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> list[bool]:
        return (self._admin or _no_layout()).contains(hashes, timeout_s)

    # --- writing ---------------------------------------------------------------------------------------------------

    def set(
        self,
        hashes: Sequence[BlockHash],
        blocks: Sequence[Buffer],
        *,
        deferred: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Store blocks; returns how many were written (blocks already stored are not written again).

        On return, the caller may reuse its buffers. With `deferred`, it returns before the server has confirmed;
        `flush` waits for that. Raises `TierFull` if there was room for none of them.
        """
        return len(self.store(hashes, blocks, deferred=deferred, timeout_s=timeout_s))

    def store(
        self,
        hashes: Sequence[BlockHash],
        blocks: Sequence[Buffer],
        *,
        deferred: bool = False,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Like `set`, but returns the positions that were written."""
        store = (self._blocks or _no_layout()).store
        if len(hashes) != len(blocks):
            raise ConfigError(f"{len(hashes)} hashes for {len(blocks)} blocks")
        views = byte_views(blocks, self.layout.block_bytes, writable=False)
        if not hashes:
            return []
        try:
            stored = store(hashes, views, deferred, timeout_s)
        except TierError as error:
            self._endpoint.counts.failed(error)
            return []
        except TierFull:
            self._endpoint.counts.refused(len(hashes))
            raise
        self._endpoint.counts.stored(len(stored))
        return stored

    def reserve(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Reservation:
        """Slots in the server's arena for the absent blocks of `hashes`, to be written in place.

        Only for a server on this host. Raises `TierFull` if some are absent and there is room for none, and `TierError`
        if the server does not answer.
        """
        blocks = self._blocks or _no_layout()
        if isinstance(blocks, RemoteBlocks):
            raise ConfigError("slots can be written in place only on a server of this host (unix:...)")
        return blocks.reserve(hashes, timeout_s)

    # --- operating -------------------------------------------------------------------------------------------------

    def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Keep the cached blocks of `hashes` until `unpin` or `drop`. Returns how many blocks."""
        return (self._admin or _no_layout()).change(lambda space, part: wire.PinRequest(space, part, True), hashes)

    def unpin(self, hashes: Sequence[BlockHash]) -> int:
        return (self._admin or _no_layout()).change(lambda space, part: wire.PinRequest(space, part, False), hashes)

    def retain(
        self,
        hashes: Sequence[BlockHash],
        ttl_s: float,
        *,
        priority: int = DEFAULT_PRIORITY,
        account: str = "",
        account_bytes: int = 0,
        timeout_s: float | None = None,
    ) -> Granted:
        """Keep the leading ones of `hashes`, cached or not, from eviction for `ttl_s` seconds, within a budget.

        `account` is one of this client's own callers, which may have `account_bytes` retained; 0 means no limit but
        this client's. If the budget is used up, blocks that the account has retained with a lower `priority` make room.
        """
        if not math.isfinite(ttl_s) or ttl_s < 0:
            raise ConfigError(f"ttl_s must be a number of seconds, not {ttl_s}")
        asked = AskedRetention(math.ceil(ttl_s), priority, account, account_bytes)
        return (self._admin or _no_layout()).retain(hashes, asked, timeout_s)

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        """Drop `hashes`, or everything in this namespace. Returns how many blocks were dropped."""
        if hashes is not None and not hashes:
            return 0
        return (self._admin or _no_layout()).change(wire.DropRequest, hashes or ())

    def list_blocks(self) -> list[tuple[BlockHash, int]]:
        """Every hash cached in this namespace with its LISTED_ flags (see `wire.messages`)."""
        return (self._admin or _no_layout()).list_blocks()

    def verify(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Have the server read these from its disk; False for a corrupt block, which is then dropped."""
        return (self._admin or _no_layout()).verify(hashes)

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Wait until everything set before, including deferred blocks, is in the cache."""
        deadline = self._endpoint.deadline(timeout_s) + (0 if timeout_s is not None else _FLUSH_S)
        self._endpoint.background.wait_for_chores(deadline)
        self._endpoint.call(wire.Flush(), wire.Done, deadline)

    def info(self) -> dict[str, object]:
        return self._server.document(wire.InfoRequest())

    def stats(self) -> dict[str, object]:
        return self._server.document(wire.StatsRequest())

    def miss_curve(self) -> dict[str, object]:
        """The share of prompts so far that a cache of each size would have hit with LRU eviction (`docs/protocol.md`).

        Raises `TierError` if the server does not know the question, or does not accept this client as an admin.
        """
        return self._server.traffic(0)

    def asked_prompts(self, first: int) -> dict[str, object]:
        """The prompts that all clients ask for, from number `first` (at least 1) on; ask again within a minute."""
        return self._server.traffic(first)

    def namespaces(self) -> list[KnownNamespace]:
        """Every namespace that is cached or in use."""
        return [known for known in self.known_namespaces() if not known.is_elsewhere]

    def known_namespaces(self) -> list[KnownNamespace]:
        """As `namespaces`, and those of other hosts in a cluster below the server."""
        return read_namespaces(self._server.described_namespaces())

    def presence(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> list[int]:
        """Where each of `hashes` is, of any namespace: LISTED_ flags (see `wire.messages`). Uses none of them."""
        return self._server.presence(namespace, hashes)

    def look(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> list[int]:
        """Like `presence`, for a request in this client's namespace: LISTED_DOWN if the server does not answer."""
        try:
            return self._server.presence(self._namespace or _no_layout(), hashes, timeout_s)
        except TierError as error:
            self._endpoint.counts.failed(error)
            return [wire.LISTED_DOWN] * len(hashes)

    def note(self, note: RequestNote) -> None:
        """Nothing is noted while the server is down, if the note is too long, or if many are on their way."""
        self._server.note(note)

    def noted(self, request_id: str) -> str | None:
        """The note on a request, unless it is too old."""
        return self._server.noted(request_id)

    def close(self) -> None:
        """Give back every lease and disconnect. Leases still open must no longer be used."""
        self._transfers.close()
        self._endpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _no_layout() -> NoReturn:
    raise ConfigError("this client has no layout: pass layout= and namespace= to connect()")
