"""Requests that move no block bytes: about the server itself, and to pin, retain, drop, list or verify blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext

from kvtier.blocks.hashing import HASH_BYTES, BlockHash, join_hashes
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.retention import Retention
from kvtier.cacheserver.connection_context import ConnectionContext
from kvtier.cacheserver.namespaces import MemorySpace
from kvtier.cacheserver.pieces import in_pieces
from kvtier.cacheserver.served_client import ServedClient
from kvtier.errors import TierRefused, TierTimeout, TierUnavailable
from kvtier.wire import messages as wire

_MAX_LISTED = 1 << 18


class AdminRequests:
    """Carries out the requests of one connection of `client`; `space_of` finds a namespace opened on it by number."""

    def __init__(
        self, context: ConnectionContext, client: ServedClient, space_of: Callable[[int], MemorySpace]
    ) -> None:
        self._context = context
        self._catalog = context.catalog
        self._client = client
        self._tenant = client.tenant
        self._space_of = space_of
        context.disk.refusals.start_reporting(client)

    def on_pin(self, request: wire.PinRequest) -> wire.Counted:
        space = self._space_of(request.space)
        act = self._catalog.pin if request.keep else self._catalog.unpin
        num_done = 0

        def do(hashes: list[BlockHash]) -> None:
            nonlocal num_done
            try:
                num_done += act(space, hashes)
            except TierRefused as error:
                raise TierRefused(f"after {num_done} others, {error}" if num_done else str(error)) from error

        in_pieces(self._context.bulk, do, request.hashes)
        return wire.Counted(num_done)

    def on_retain(self, request: wire.RetainRequest) -> wire.Retained:
        space, asked = self._space_of(request.space), request
        ttl_s = min(asked.ttl_s, int(self._context.config.max_retention_s))
        num_hashes, num_done, is_short = len(asked.hashes) // HASH_BYTES, 0, False
        limit = asked.account_bytes // SLOT_ALIGN_BYTES if asked.account_bytes else None

        def do(hashes: list[BlockHash]) -> None:
            nonlocal num_done, is_short
            if not ttl_s:
                num_done += self._catalog.retentions.end(space, hashes, asked.account)
            elif not is_short:
                wanted = Retention(ttl_s, asked.priority, asked.account, limit)
                count = self._catalog.retentions.retain(space, hashes, wanted)
                num_done += count
                is_short = count < len(hashes)

        in_pieces(self._context.bulk, do, asked.hashes)
        reason = ""
        if is_short:
            reason = f"retained {num_done} of {num_hashes} blocks: the budget for retained blocks is used up"
        elif ttl_s < asked.ttl_s:
            reason = f"this server retains blocks for at most {ttl_s} s"
        return wire.Retained(num_done, ttl_s, reason)

    def on_drop(self, request: wire.DropRequest) -> wire.Counted:
        space = self._space_of(request.space)
        dropped = in_pieces(self._context.bulk, lambda hashes: self._catalog.drop(space, hashes), request.hashes)
        return wire.Counted(sum(dropped))

    def on_list(self, request: wire.ListRequest) -> wire.Listed:
        hashes, flags, is_last = self._catalog.inventory.list_blocks(
            self._space_of(request.space), request.first, _MAX_LISTED
        )
        return wire.Listed(join_hashes(hashes), flags, 0 if is_last else request.first + _MAX_LISTED)

    def on_verify(self, request: wire.VerifyRequest) -> wire.Contained:
        space = self._space_of(request.space)
        disk = self._context.disk
        try:
            # Every piece reads from the disk, so this does not take `bulk`: other requests are served meanwhile.
            found = in_pieces(nullcontext(), lambda hashes: disk.verify(space, hashes), request.hashes)
            return wire.Contained(b"".join(map(bytes, found)))
        except TierUnavailable as error:
            raise TierRefused(str(error)) from error

    def on_flush(self, request: wire.Flush) -> wire.Done:
        """With a disk, every block committed before the request is on disk when the reply is sent."""
        try:
            self._context.disk.flush(self._context.config.flush_timeout_s)
        except (TierTimeout, TierUnavailable) as error:
            raise TierRefused(str(error)) from error
        if sentence := self._context.disk.refusals.report(self._client):
            raise TierRefused(sentence)
        return wire.Done()

    def on_note(self, request: wire.NoteRequest) -> wire.Done:
        self._tenant.notes.put(request.request_id, request.text)
        return wire.Done()

    def on_noted(self, request: wire.NotedRequest) -> wire.Document:
        return wire.Document(self._tenant.notes.get(request.request_id))

    def on_info(self, request: wire.InfoRequest) -> wire.Document:
        return wire.Document(json.dumps(self._context.describe(self._tenant)))

    def on_stats(self, request: wire.StatsRequest) -> wire.Document:
        return wire.Document(json.dumps(self._context.count_up(self._tenant)))

    def on_spaces(self, request: wire.SpacesRequest) -> wire.Document:
        return wire.Document(json.dumps(self._catalog.inventory.known_spaces(self._tenant, request.first)))

    def on_misscurve(self, request: wire.MissCurveRequest) -> wire.Document:
        if not self._tenant.sees_all:
            raise TierRefused("only the server's owner and its admins may see the requests of all clients")
        traffic = self._context.traffic
        first = request.prompts_from
        return wire.Document(json.dumps(traffic.prompts_from(first) if first else traffic.curve()))

    def on_ping(self, request: wire.Ping) -> wire.Done:
        return wire.Done()

    def on_bye(self, request: wire.Bye) -> wire.Done:
        self._catalog.end(self._client)
        return wire.Done()
