"""Questions and orders about the contents of a server; no block's bytes are moved. Thread-safe."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.blocks.hashing import BlockHash, split_hashes
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.retention import DEFAULT_PRIORITY, Granted
from kvtier.client.endpoint import Endpoint
from kvtier.client.server_connection import joined
from kvtier.errors import ConfigError, TierError, TierRefused, TierUnavailable
from kvtier.observe.printable import printable
from kvtier.wire import messages as wire
from kvtier.wire.frames import MAX_HASHES

_MAX_NOTES_WAITING = 256
_MAX_NAMESPACES = 1 << 24
_MAX_REASON_CHARS = 300
_NOT_UNDERSTOOD = "a message that cannot be read"
"""A server's answer to an unknown message."""


class RequestNote(Protocol):
    """A note on a request."""

    @property
    def request_id(self) -> str: ...

    def to_json(self) -> str: ...


class ServerAdmin:
    """Questions about a server, any of its namespaces, and the requests that it keeps notes on."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._note_places = threading.Semaphore(_MAX_NOTES_WAITING)

    def traffic(self, prompts_from: int) -> dict[str, object]:
        """Raises `TierUnavailable` if the server is too old for the question, which also ends the connection."""
        try:
            return self.document(wire.MissCurveRequest(prompts_from))
        except TierUnavailable as error:
            if _NOT_UNDERSTOOD not in str(error):
                raise
            raise TierUnavailable(
                "the cache server is older than this command, and keeps no record of traffic"
            ) from error

    def document(self, request: wire.InfoRequest | wire.StatsRequest | wire.MissCurveRequest) -> dict[str, object]:
        document = json.loads(self._endpoint.call(request, wire.Document).text)
        if not isinstance(document, dict):
            raise TierUnavailable("the server answered with something else than a document")
        return document

    def described_namespaces(self) -> list[dict[str, object]]:
        """All of them, as described by the server, page by page."""
        found: dict[object, dict[str, object]] = {}
        first = 0
        while page := json.loads(self._endpoint.call(wire.SpacesRequest(first), wire.Document).text):
            if not isinstance(page, list) or first > _MAX_NAMESPACES:
                raise TierUnavailable("the server describes its namespaces in a way unknown here")
            first += len(page)
            found |= {each.get("namespace"): each for each in page if isinstance(each, dict)}
        return list(found.values())

    def presence(self, namespace: Namespace, hashes: Sequence[BlockHash], timeout_s: float | None = None) -> list[int]:
        deadline = self._endpoint.deadline(timeout_s)
        flags: list[int] = []
        for first in range(0, len(hashes), MAX_HASHES):
            part = hashes[first : first + MAX_HASHES]
            reply = self._endpoint.call(wire.PresenceRequest(namespace, joined(part)), wire.Contained, deadline)
            if len(reply.flags) != len(part):
                raise TierUnavailable("the server answered for other blocks than it was asked for")
            flags += reply.flags
        return flags

    def note(self, note: RequestNote) -> None:
        try:
            request = wire.NoteRequest(note.request_id, note.to_json())
        except ValueError as error:
            self._endpoint.counts.failed(TierRefused(str(error)))
            return
        if not self._endpoint.breaker.is_open and self._note_places.acquire(blocking=False):
            self._endpoint.background.do_later(functools.partial(self._send_note, request))

    def noted(self, request_id: str) -> str | None:
        try:
            request = wire.NotedRequest(request_id)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return self._endpoint.call(request, wire.Document).text or None

    def _send_note(self, request: wire.NoteRequest) -> None:
        self._note_places.release()
        try:
            self._endpoint.call(request, wire.Done)
        except TierError as error:  # lost: its caller is gone
            self._endpoint.counts.failed(error)


@dataclass(frozen=True, slots=True)
class AskedRetention:
    """Retention for `ttl_s` seconds; 0 ends what `account` has retained. See `wire.RetainRequest`."""

    ttl_s: int
    priority: int = DEFAULT_PRIORITY
    account: str = ""
    account_bytes: int = 0

    def request(self, space: int, hashes: bytes) -> wire.RetainRequest:
        """Raises `ConfigError` for values that no server would accept."""
        try:
            return wire.RetainRequest(space, hashes, self.ttl_s, self.priority, self.account, self.account_bytes)
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from error


class NamespaceAdmin:
    """Questions and orders about the blocks of one namespace, which `endpoint` opens."""

    def __init__(self, endpoint: Endpoint, block_bytes: int) -> None:
        self._endpoint = endpoint
        self._block_bytes = block_bytes

    def contains(self, hashes: Sequence[BlockHash], timeout_s: float | None) -> list[bool]:
        deadline = self._endpoint.deadline(timeout_s)
        flags: list[bool] = []
        try:
            for first in range(0, len(hashes), MAX_HASHES):
                part = hashes[first : first + MAX_HASHES]
                with self._endpoint.connection(deadline) as connection:
                    request = wire.ContainsRequest(connection.space, joined(part))
                    reply = connection.call(request, wire.Contained, deadline)
                flags += map(bool, reply.flags.ljust(len(part), b"\0")[: len(part)])
        except TierError as error:
            self._endpoint.counts.failed(error)
        return flags + [False] * (len(hashes) - len(flags))

    def change(self, order: Callable[[int, bytes], wire.Request], hashes: Sequence[BlockHash]) -> int:
        """Give an order about `hashes`, made from a space and a run of hashes. Returns how many blocks it changed."""
        deadline = self._endpoint.deadline()
        total = 0
        for first in range(0, max(1, len(hashes)), MAX_HASHES):
            with self._endpoint.connection(deadline) as connection:
                request = order(connection.space, joined(hashes[first : first + MAX_HASHES]))
                total += connection.call(request, wire.Counted, deadline).count
        return total

    def retain(self, hashes: Sequence[BlockHash], asked: AskedRetention, timeout_s: float | None = None) -> Granted:
        """Also raises `TierRefused` if the server's release does not support this."""
        deadline = self._endpoint.deadline(timeout_s)
        num_kept, ttl_s = 0, float(asked.ttl_s)
        for first in range(0, max(1, len(hashes)), MAX_HASHES):
            part = hashes[first : first + MAX_HASHES]
            with self._endpoint.connection(deadline) as connection:
                if not connection.can_retain:
                    raise TierRefused("the cache server is of a release that knows no retention")
                reply = connection.call(asked.request(connection.space, joined(part)), wire.Retained, deadline)
            num_kept += min(reply.count, len(part))
            ttl_s = min(ttl_s, reply.ttl_s)
            if reply.count < len(part) and asked.ttl_s:
                break
        return Granted(num_kept, ttl_s, printable(reply.reason, _MAX_REASON_CHARS))

    def list_blocks(self) -> list[tuple[BlockHash, int]]:
        found: dict[BlockHash, int] = {}
        first = 0
        while True:
            deadline = self._endpoint.deadline()
            with self._endpoint.connection(deadline) as connection:
                listed = connection.call(wire.ListRequest(connection.space, first), wire.Listed, deadline)
            found.update(zip(split_hashes(listed.hashes), listed.flags, strict=True))
            if listed.next_first <= first:
                return list(found.items())
            first = listed.next_first

    def verify(self, hashes: Sequence[BlockHash]) -> list[bool]:
        deadline = self._endpoint.deadline(None, len(hashes) * self._block_bytes)
        with self._endpoint.connection(deadline) as connection:
            request = wire.VerifyRequest(connection.space, joined(hashes))
            return list(map(bool, connection.call(request, wire.Contained, deadline).flags))
