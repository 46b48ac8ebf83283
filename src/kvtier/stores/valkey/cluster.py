"""The nodes of a cluster: who has which slot, who is down, and work that is spread over them. Thread-safe.

A keeper thread asks who has the slots when a node says that one has moved, when a node is down, and now and then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvtier.errors import ProtocolError, TierError, TierUnavailable
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.valkey.node import NodeAccess, NodeAddress, NodeConnection
from kvtier.stores.valkey.resp import Reply, ReplyError, command
from kvtier.stores.valkey.shard import CONNECTIONS_PER_SHARD, Shard
from kvtier.stores.valkey.slots import NUM_SLOTS, nodes_of, read_redirection, read_slots
from kvtier.workers import Workers

logger = logging.getLogger(__name__)

_MAX_REDIRECTIONS = 4
_MAX_NODES = 2048
_FEW_NODES = 3
"""With fewer nodes, each is used over several connections at once."""
_MAX_THREADS = 16
_KEEPER_S = 0.5
_REFRESH_S = 30.0
_PROBE_S = 1.0
_MAX_ANSWERS = 8
"""After this many answers without an owner for each slot, no more nodes are asked."""
_SLOTS = command(b"CLUSTER", b"SLOTS")
_ASKING = command(b"ASKING")


@dataclass(frozen=True, slots=True)
class Redirection:
    """A node does not have a slot: another one does, for now (it is `asking`) or from now on."""

    address: NodeAddress
    is_asking: bool


@dataclass(slots=True)
class NodeShare:
    """The part of a request for one node over one connection: positions, and the nodes that some were redirected to.

    Before each of its commands comes ASKING if `is_asking`: the node is about to take the slot over.
    """

    positions: Sequence[int]
    is_asking: bool = False
    redirections: dict[int, Redirection] = field(default_factory=dict)

    @property
    def prefix(self) -> bytes:
        """What comes before each command."""
        return _ASKING if self.is_asking else b""

    def read(
        self,
        node: NodeConnection,
        deadline: float,
        into: Sequence[memoryview] | None = None,
        *,
        longest: int | None = None,
    ) -> Reply:
        """The reply to a command that was sent with the prefix; see `ReplyReader.read`."""
        if self.is_asking:
            node.read(deadline)
        return node.read(deadline, into, longest=longest)


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """How a node failed, as words: an exception would keep the frames that it passed, and views of blocks with them."""

    kind: str
    sentence: str


Act: TypeAlias = Callable[[NodeConnection, NodeShare], None]


class Cluster:
    """Reached through any of `seeds`. It need not answer now: it is used once it does."""

    def __init__(self, seeds: Sequence[NodeAddress], access: NodeAccess) -> None:
        self._seeds = seeds
        self._access = access
        self._lock = threading.Lock()
        self._shards: dict[NodeAddress, Shard] = {}
        self._owners: list[NodeAddress | None] = [None] * NUM_SLOTS
        self._workers = Workers(_MAX_THREADS, "kvtier-cluster")
        self._probers = Workers(_MAX_THREADS, "kvtier-cluster-probe")
        self._log = LogLimit(logger)
        self._wakes = threading.Event()
        self._is_closed = False
        self._is_stale = True
        self.num_refreshes = 0
        self.num_busy = 0
        """Connections in use for blocks."""
        self._keeper = threading.Thread(target=self._run_keeper, name="kvtier-cluster-keeper", daemon=True)
        self._is_ready = threading.Event()
        self._keeper.start()

    def wait_until_known(self, timeout_s: float) -> bool:
        """Whether the cluster has said who has its slots; waits for that at most so long."""
        return self._is_ready.wait(timeout_s)

    @property
    def num_down(self) -> int:
        return sum(shard.is_down for shard in list(self._shards.values()))

    def nodes(self) -> list[NodeAddress]:
        """All that have slots."""
        return list(self._shards)

    # --- work ------------------------------------------------------------------------------------------------------

    def spread(self, slots: Sequence[int], act: Act, deadline: float, *, split_above: int) -> list[NodeFailure]:
        """`act` on the node of each of `slots`, some positions of them at a time. Returns how nodes failed.

        More than `split_above` positions of one node are shared by its connections.
        """
        groups: dict[tuple[NodeAddress, bool], list[int]] = {}
        failures: list[NodeFailure] = []
        for position, slot in enumerate(slots):
            owner = self._owners[slot]
            if owner is not None:
                groups.setdefault((owner, False), []).append(position)
        if sum(map(len, groups.values())) < len(slots):
            self._note_stale()
        if not groups and slots:
            return [NodeFailure(TierUnavailable.kind, "the cluster has not said who has its slots")]
        for _ in range(_MAX_REDIRECTIONS):
            works = [
                (address, NodeShare(part, is_asking))
                for (address, is_asking), positions in groups.items()
                for part in _parts(positions, split_above if len(groups) < _FEW_NODES else len(positions))
            ]
            failures += self._each(works, act, deadline)
            groups = {}
            for _, share in works:
                for position, to in share.redirections.items():
                    groups.setdefault((to.address, to.is_asking), []).append(position)
            if not groups:
                break
        return failures

    def ask_node(self, address: NodeAddress, request: bytes, deadline: float) -> Reply:
        """Raises whatever fails."""
        with self._shard(address).connection(deadline) as connection:
            return connection.ask(request, deadline)

    def redirected(self, share: NodeShare, position: int, error: ReplyError, asked: NodeAddress) -> bool:
        """Whether `error` sends a position elsewhere, as its `share` says from now on."""
        if error.code not in ("MOVED", "ASK"):
            return False
        slot, address = read_redirection(error.sentence, asked)
        if error.code == "MOVED":
            with self._lock:
                self._owners[slot] = address
            self._note_stale()
        share.redirections[position] = Redirection(address, error.code == "ASK")
        return True

    def close(self) -> None:
        self._is_closed = True
        self._wakes.set()
        self._keeper.join()
        self._probers.close()
        self._workers.close()
        for shard in list(self._shards.values()):
            shard.close()

    def _each(self, works: Sequence[tuple[NodeAddress, NodeShare]], act: Act, deadline: float) -> list[NodeFailure]:
        def one(work: tuple[NodeAddress, NodeShare]) -> NodeFailure | None:
            address, share = work
            try:
                with self._shard(address).connection(deadline) as connection, self._busy():
                    act(connection, share)
            except (TierError, ProtocolError) as error:
                self._note_stale()
                return NodeFailure(error.kind if isinstance(error, TierError) else "protocol", str(error))
            return None

        outcomes = [one(work) for work in works] if len(works) == 1 else self._workers.map(one, works)
        return [outcome for outcome in outcomes if outcome is not None]

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        with self._lock:
            self.num_busy += 1
        try:
            yield
        finally:
            with self._lock:
                self.num_busy -= 1

    def _shard(self, address: NodeAddress) -> Shard:
        with self._lock:
            shard = self._shards.get(address)
            if shard is None:
                if self._is_closed or len(self._shards) >= _MAX_NODES:
                    raise TierUnavailable(f"the cluster's node {address} is not used")
                shard = self._shards[address] = Shard(address, self._access)
            return shard

    # --- the keeper ------------------------------------------------------------------------------------------------

    def _note_stale(self) -> None:
        self._is_stale = True
        self._wakes.set()

    def _run_keeper(self) -> None:
        refreshed_at = float("-inf")
        while not self._is_closed:
            has_down = False
            try:
                has_down = self._probe()
                if self._is_stale or has_down or time.monotonic() - refreshed_at > _REFRESH_S:
                    self._is_stale = not self._refresh()
                    refreshed_at = time.monotonic()
            except Exception:  # a thread that ended would leave the cluster as it was for ever
                logger.exception("looking at the cluster failed")
            self._wakes.clear()
            if self._is_closed:
                return
            # Also after news, for a moment: a slot on the move is told again with every block of it.
            self._wakes.wait(_KEEPER_S if self._is_stale or has_down else _REFRESH_S)
            if not self._is_closed and self._wakes.is_set():
                time.sleep(_KEEPER_S / 10)

    def _probe(self) -> bool:
        """Whether a node that was down still is. Many may be silent at once, and none waits for the others."""

        def is_back(shard: Shard) -> bool:
            return not self._is_closed and shard.probe(_PROBE_S)

        down = [shard for shard in list(self._shards.values()) if shard.is_down]
        found = self._probers.map(is_back, down) if len(down) > 1 else [is_back(shard) for shard in down]
        return not all(found)

    def _refresh(self) -> bool:
        """Ask nodes who has the slots, until one names a node for each; else the one that names most is believed.

        One that was restarted without its file knows of none. False if no node answered.
        """
        known = [address for address, shard in list(self._shards.items()) if not shard.is_down]
        best: list[NodeAddress | None] = []
        most = num_answers = 0
        for address in dict.fromkeys([*known, *self._seeds]):
            if self._is_closed:
                return False
            owners = self._owners_as_told_by(address)
            num_owned = NUM_SLOTS - owners.count(None) if owners else 0
            if num_owned > most:
                best, most = owners, num_owned
            num_answers += bool(owners)
            if most == NUM_SLOTS or num_answers == _MAX_ANSWERS:
                break
        if most:
            self._adopt(best)
        elif num_answers:
            self._log.warning("no slots", "cluster: no node that answers knows who has its slots")
        return most > 0

    def _owners_as_told_by(self, address: NodeAddress) -> list[NodeAddress | None]:
        """Empty if the node does not answer."""
        deadline = time.monotonic() + _PROBE_S
        try:
            with contextlib.closing(NodeConnection(address, self._access, deadline)) as connection:
                return read_slots(connection.ask(_SLOTS, deadline), address)
        except (TierError, ProtocolError) as error:
            self._log.warning("seed", "cluster: %s", str(error))
            return []

    def _adopt(self, owners: list[NodeAddress | None]) -> None:
        nodes = nodes_of(owners)
        with self._lock:
            gone = [self._shards.pop(address) for address in list(self._shards) if address not in nodes]
            for address in nodes:
                if address not in self._shards and len(self._shards) < _MAX_NODES:
                    self._shards[address] = Shard(address, self._access)
            self._owners = owners
        for shard in gone:
            shard.close()
        self.num_refreshes += 1
        self._is_ready.set()


def _parts(positions: list[int], split_above: int) -> list[list[int]]:
    """Adjacent parts, one for each connection that a node has."""
    if len(positions) <= split_above:
        return [positions]
    middle = -(-len(positions) // CONNECTIONS_PER_SHARD)
    return [positions[first : first + middle] for first in range(0, len(positions), middle)]
