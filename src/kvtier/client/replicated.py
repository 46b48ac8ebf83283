"""The client of several cache servers: rendezvous hashing with replicas, reads spread over them. Thread-safe.

Each block has an order of servers of its own; it is written to the first `replicas` of those that are up and read from
any of them. A server that dies costs what only it had; its blocks go to the next in order until it is back. Every
client of the same servers must name them by the same addresses.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self, TypeVar

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.match_end import MatchEnd, most_telling
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient, Note, SingleClient
from kvtier.client.known_namespace import KnownNamespace
from kvtier.client.placement import Placement
from kvtier.errors import ConfigError, LeaseError, TierError, TierFull, TierUnavailable
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import EmptyLease, Lease
from kvtier.observe.metrics import TierMetrics
from kvtier.wire.messages import LISTED_CACHED, LISTED_DOWN, match_end_of
from kvtier.workers import Workers

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class ReplicatedClient(CacheClient):
    """A `CacheClient` of several servers."""

    def __init__(self, clients: Sequence[SingleClient], replicas: int, metrics: TierMetrics) -> None:
        self.clients = list(clients)
        self.metrics = metrics
        self._placement = Placement([str(client.address) for client in clients], replicas)
        self._workers = Workers(len(clients), "kvtier-replicas")

    @property
    def layout(self) -> KvLayout:
        return self.clients[0].layout

    @property
    def num_returns(self) -> tuple[int, ...]:
        return tuple(count for client in self.clients for count in client.num_returns)

    def hashes(self, tokens: Sequence[int]) -> list[BlockHash]:
        return self.clients[0].hashes(tokens)

    # --- reading ---------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        if not hashes:
            return EmptyLease(MatchEnd.ALL)
        parts: list[_Part] = []

        def ask(client: SingleClient, positions: list[int]) -> int:
            lease = client.match([hashes[position] for position in positions], timeout_s=timeout_s)
            parts.append(_Part(lease, positions[: lease.num_blocks]))
            return lease.num_blocks

        found, ended = self._ask_holders(hashes, ask, timeout_s)
        num_blocks = _leading(found)
        useful = []
        for part in parts:
            if part.positions and part.positions[0] < num_blocks:
                useful.append(part)
            else:
                part.lease.release()
        if num_blocks < len(found):  # a server gave less than it has
            ended = most_telling(part.lease.ended for part in parts)
        if not useful:
            return EmptyLease(ended)
        return ReplicatedLease(useful, num_blocks, ended)

    def get(self, hashes: Sequence[BlockHash], into: Sequence[Buffer], *, timeout_s: float | None = None) -> int:
        count = min(len(hashes), len(into))

        def ask(client: SingleClient, positions: list[int]) -> int:
            wanted = [hashes[position] for position in positions]
            return client.get(wanted, [into[position] for position in positions], timeout_s=timeout_s)

        return _leading(self._ask_holders(hashes[:count], ask, timeout_s)[0])

    def stream_get(
        self, hashes: Sequence[BlockHash], into: Sequence[Buffer] | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        """Blocks come from several servers: each run of the prefix is fetched whole, then handed out in order."""
        block_bytes = self.layout.block_bytes
        step = max(1, (32 << 20) // block_bytes)
        for first in range(0, len(hashes), step):
            part = hashes[first : first + step]
            target: Sequence[Buffer] = (
                [memoryview(bytearray(block_bytes)) for _ in part] if into is None else into[first : first + step]
            )
            arrived = self.get(part, target)
            for offset in range(arrived):
                yield first + offset, memoryview(target[offset])
            if arrived < len(part):
                return

    def contains(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> list[bool]:
        flags = [False] * len(hashes)
        groups = self._all_replicas(hashes)

        def ask(server: int) -> None:
            positions = groups[server]
            answers = self.clients[server].contains([hashes[p] for p in positions], timeout_s=timeout_s)
            for position, answer in zip(positions, answers, strict=True):
                if answer:
                    flags[position] = True

        self._workers.map(ask, groups)
        return flags

    # --- writing ---------------------------------------------------------------------------------------------------

    def set(
        self,
        hashes: Sequence[BlockHash],
        blocks: Sequence[Buffer],
        *,
        deferred: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """As for one server; a block counts once, however many replicas were written."""
        if len(hashes) != len(blocks):
            raise ConfigError(f"{len(hashes)} hashes for {len(blocks)} blocks")
        groups = self._all_replicas(hashes)

        full: list[TierFull] = []

        def store(server: int) -> list[int]:
            positions = groups[server]
            wanted = [hashes[position] for position in positions]
            values = [blocks[position] for position in positions]
            try:
                written = self.clients[server].store(wanted, values, deferred=deferred, timeout_s=timeout_s)
            except TierFull as error:
                full.append(error)
                return []
            return [positions[index] for index in written]

        written = set().union(*self._workers.map(store, groups))
        if full and len(full) == len(groups):
            raise full[0]
        return len(written)

    # --- operating -------------------------------------------------------------------------------------------------

    def pin(self, hashes: Sequence[BlockHash]) -> int:
        groups = self._all_replicas(hashes)
        kept = self._on_each(lambda server: self.clients[server].pin([hashes[p] for p in groups[server]]), list(groups))
        return min(len(hashes), sum(kept))

    def unpin(self, hashes: Sequence[BlockHash]) -> int:
        return max(self._on_each(lambda server: self.clients[server].unpin(hashes)), default=0)

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        """Counts copies: a block on two servers goes twice."""
        return sum(self._on_each(lambda server: self.clients[server].drop(hashes)))

    def flush(self, *, timeout_s: float | None = None) -> None:
        self._on_each(lambda server: self.clients[server].flush(timeout_s=timeout_s))

    def info(self) -> dict[str, object]:
        return self._documents(SingleClient.info)

    def stats(self) -> dict[str, object]:
        return self._documents(SingleClient.stats)

    def namespaces(self) -> list[KnownNamespace]:
        """Of all servers that answer; each once, from a server that knows what it covers where there is one."""
        known: dict[str, KnownNamespace] = {}
        for single in self._of_those_that_answer(SingleClient.namespaces):
            for each in single:
                if each.digest not in known or known[each.digest].fields is None:
                    known[each.digest] = each
        return list(known.values())

    def presence(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> list[int]:
        """What any server says of a block; LISTED_DOWN too where none has it and one of them does not answer."""
        answers = self._of_those_that_answer(lambda client: client.presence(namespace, hashes))
        missing = LISTED_DOWN if len(answers) < len(self.clients) else 0
        merged = [functools.reduce(operator.or_, flags) for flags in zip(*answers, strict=True)]
        return [flags if flags & LISTED_CACHED else flags | missing for flags in merged]

    def note(self, note: Note) -> None:
        """To the first server that is up: `noted` asks all of them."""
        up = next((client for client in self.clients if client.is_up), None)
        if up is not None:
            up.note(note)

    def noted(self, request_id: str) -> str | None:
        answers = self._of_those_that_answer(lambda client: client.noted(request_id))
        return next((text for text in answers if text is not None), None)

    def close(self) -> None:
        self._workers.close()
        for client in self.clients:
            client.close()

    # --- private ---------------------------------------------------------------------------------------------------

    def _all_replicas(self, hashes: Sequence[BlockHash]) -> dict[int, list[int]]:
        """Positions by server, each position with all of its servers."""
        return self._placement.by_server(hashes, [client.is_up for client in self.clients])

    def _holders(self, hashes: Sequence[BlockHash], timeout_s: float | None) -> tuple[list[list[int]], MatchEnd]:
        """For each leading block that is there the servers that have it, those that should have had it when all were
        up first, and what a lease says of the block that follows.
        """
        is_up = [client.is_up for client in self.clients]
        groups = self._all_replicas(hashes)
        answers = self._workers.map(
            lambda server: self.clients[server].look([hashes[p] for p in groups[server]], timeout_s=timeout_s), groups
        )
        flags_of: list[dict[int, int]] = [{} for _ in hashes]
        for (server, positions), all_flags in zip(groups.items(), answers, strict=True):
            for position, flags in zip(positions, all_flags, strict=True):
                flags_of[position][server] = flags
        found: list[list[int]] = []
        for block_hash, by_server in zip(hashes, flags_of, strict=True):
            homes = self._placement.homes(block_hash, is_up)
            holders = [server for server in homes if by_server[server] & LISTED_CACHED]
            if not holders:
                return found, self._ending(block_hash, by_server)
            found.append(holders)
        return found, MatchEnd.ALL

    def _ending(self, block_hash: BlockHash, flags: Mapping[int, int]) -> MatchEnd:
        """What a lease says of a block that none of its servers has, by what each of them said."""
        homes = self._placement.homes(block_hash)
        is_down = any(server not in flags or flags[server] & LISTED_DOWN for server in homes)
        seen = functools.reduce(operator.or_, flags.values(), LISTED_DOWN if is_down else 0)
        return match_end_of(seen)

    def _ask_holders(
        self, hashes: Sequence[BlockHash], ask: Callable[[SingleClient, list[int]], int], timeout_s: float | None
    ) -> tuple[list[bool], MatchEnd]:
        """Ask one server that has it for each block of the longest prefix that is there. True where it came.

        `ask` answers how many of the leading positions it was given came. A server is asked for what it said it has,
        so that a hole in one server's share does not hide what follows. Also returns what a lease says of the block
        after that prefix.
        """
        groups: dict[int, list[int]] = {}
        all_holders, ended = self._holders(hashes, timeout_s)
        for position, holders in enumerate(all_holders):
            # A byte that the order does not depend on spreads the reads.
            groups.setdefault(holders[hashes[position][2] % len(holders)], []).append(position)
        found = [False] * len(all_holders)
        counts = self._workers.map(lambda item: ask(self.clients[item[0]], item[1]), groups.items())
        for positions, count in zip(groups.values(), counts, strict=True):
            for position in positions[:count]:
                found[position] = True
        return found, ended

    def _on_each(self, act: Callable[[int], object], servers: Sequence[int] | None = None) -> list[int]:
        """Act on every server, also when one fails; then raise what failed."""
        outcomes = _outcomes(act, range(len(self.clients)) if servers is None else servers)
        failures = [str(outcome) for outcome in outcomes if isinstance(outcome, TierError)]
        if failures:
            raise TierUnavailable("; ".join(failures))
        return [outcome if isinstance(outcome, int) else 0 for outcome in outcomes]

    def _of_those_that_answer(self, ask: Callable[[SingleClient], _Answer]) -> list[_Answer]:
        """Raises what failed when no server answers."""
        outcomes = _outcomes(ask, self.clients)
        answers = [outcome for outcome in outcomes if not isinstance(outcome, TierError)]
        if not answers:
            raise TierUnavailable("; ".join(map(str, outcomes)))
        return answers

    def _documents(self, ask: Callable[[SingleClient], dict[str, object]]) -> dict[str, object]:
        return {
            str(client.address): {"error": str(outcome)} if isinstance(outcome, TierError) else outcome
            for client, outcome in zip(self.clients, _outcomes(ask, self.clients), strict=True)
        }


def _outcomes(ask: Callable[[_Item], _Answer], items: Iterable[_Item]) -> list[_Answer | TierError]:
    """What each answers, or how it failed."""
    outcomes: list[_Answer | TierError] = []
    for item in items:
        try:
            outcomes.append(ask(item))
        except TierError as error:
            outcomes.append(error)
    return outcomes


class _Part(NamedTuple):
    """One server's share of a match."""

    lease: Lease
    positions: list[int]


class ReplicatedLease:
    """A lease over several servers. Not thread-safe."""

    num_stored = 0
    arena = None
    offsets = ()

    def __init__(self, parts: list[_Part], num_blocks: int, ended: MatchEnd) -> None:
        self._parts = parts
        self.num_blocks = num_blocks
        self.num_ready_at_match = num_blocks
        self.ended = ended
        self._is_over = False

    @property
    def has_views(self) -> bool:
        return all(part.lease.has_views for part in self._parts)

    def wait(self, count: int | None = None) -> int:
        self._check()
        wanted = self.num_blocks if count is None else min(count, self.num_blocks)
        found = [False] * wanted
        for part in self._parts:
            positions = [position for position in part.positions if position < wanted]
            for position in positions[: part.lease.wait(len(positions))]:
                found[position] = True
        if _leading(found) < wanted:
            self.num_blocks = _leading(found)
            self.ended = MatchEnd.LOST
        return _leading(found)

    def views(self, first: int = 0, count: int | None = None) -> list[memoryview]:
        end = self.wait(None if count is None else first + count)
        views: dict[int, memoryview] = {}
        for part in self._parts:
            wanted = sum(position < end for position in part.positions)
            for position, view in zip(part.positions, part.lease.views(0, wanted), strict=False):
                views[position] = view
        return [views[position] for position in range(first, end)]

    def fetch(self, into: Sequence[Buffer], first: int = 0) -> int:
        self._check()
        count = max(0, min(len(into), self.num_blocks - first))
        found = [False] * count
        for part in self._parts:
            num_before = sum(position < first for position in part.positions)
            places = [position - first for position in part.positions if first <= position < first + count]
            for place in places[: part.lease.fetch([into[place] for place in places], num_before)]:
                found[place] = True
        return _leading(found)

    def release(self) -> None:
        for part in self._parts:
            part.lease.release()
        self._is_over = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _check(self) -> None:
        if self._is_over:
            raise LeaseError("this lease has ended")


def _leading(found: Sequence[bool]) -> int:
    """How many are True before the first False."""
    return found.index(False) if False in found else len(found)
