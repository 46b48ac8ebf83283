"""The namespaces of a server in one cluster: the places of blocks in prompts, and which blocks the cluster has.

Thread-safe, and without the catalog's lock: everything here may wait for the cluster, within deadlines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver.namespaces import Hashes, MemorySpace
from kvtier.errors import KvtierError
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.stored_block import StoreSpace
from kvtier.stores.valkey.announcements import Announcer, ComputedElsewhere
from kvtier.stores.valkey.blocks import ClusterBlocks
from kvtier.stores.valkey.config import ClusterConfig, open_cluster
from kvtier.stores.valkey.described import DescribedNamespace, DescribedNamespaces
from kvtier.stores.valkey.renewals import Renewals

logger = logging.getLogger(__name__)

_DROP_S = 60.0
_DROP_WAIT_S = 0.5
_DESCRIBE_S = 1.0
_FIRST_ASKED = 64
_GROWTH = 8
_MAX_ASKED = 1 << 14
_MAX_SPACES = 64
_MAX_PLACES = 1 << 17

FieldsOf: TypeAlias = Callable[[MemorySpace], str | None]
"""What a namespace covers, in JSON, if a client has said so."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Blocks that the server lacks: `found` in the cluster, `unknown` if it did not answer.

    Other hosts are `computing` a block that the cluster lacks, too.
    """

    found: frozenset[BlockHash] = frozenset()
    unknown: frozenset[BlockHash] = frozenset()
    computing: frozenset[BlockHash] = frozenset()

    def why_absent(self, block_hash: BlockHash) -> MatchEnd | None:
        """Why a match ends at this block, which is not in the server's memory; None if the cluster cannot tell."""
        if block_hash in self.found:
            return MatchEnd.LIMIT  # no memory is left to load it into
        if block_hash in self.computing:
            return MatchEnd.PENDING
        return MatchEnd.TIER_DOWN if block_hash in self.unknown else None


NOWHERE = Elsewhere()


class ClusterSpaces:
    """The cluster's blocks for each of the 64 most recently used namespaces. Owns the connections.

    With an `announcer` of this server's own blocks, blocks that other hosts are computing are told from misses.
    """

    def __init__(
        self, config: ClusterConfig, announcer: Announcer | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self._clock = clock
        self._renewals = Renewals()
        self._computed = None if announcer is None else ComputedElsewhere(announcer)
        self._cluster = open_cluster(config)
        self.fields_of: FieldsOf = lambda space: None
        self._described = DescribedNamespaces(self._cluster, ttl_s=config.ttl_s, clock=clock)
        self._lock = threading.Lock()
        self._spaces: OrderedDict[tuple[Namespace, int], ClusterBlocks] = OrderedDict()
        self._losses: Counter[str] = Counter()
        self._log = LogLimit(logger)
        self.num_found = 0

    def wait_until_known(self, timeout_s: float) -> bool:
        """Wait until the cluster has told which node has which slot. Returns whether it has."""
        return self._cluster.wait_until_known(timeout_s)

    def of(self, space: MemorySpace | StoreSpace) -> ClusterBlocks:
        key = space.namespace, space.block_bytes
        with self._lock:
            blocks = self._spaces.get(key)
            if blocks is None:
                blocks = self._spaces[key] = self._opened(*key)
            self._spaces.move_to_end(key)
            if len(self._spaces) > _MAX_SPACES:
                self._spaces.popitem(last=False)
            while self._num_places() > _MAX_PLACES:
                max((each.places for each in self._spaces.values()), key=len).forget_older_half()
            return blocks

    def _opened(self, namespace: Namespace, block_bytes: int) -> ClusterBlocks:
        return ClusterBlocks(
            self._cluster,
            namespace,
            block_bytes,
            ttl_s=self.config.ttl_s,
            segment_blocks=self.config.segment,
            on_loss=self.note_loss,
            clock=self._clock,
        )

    def presence(self, namespace: Namespace, hashes: Hashes) -> list[bool | None]:
        """Which blocks of a whole prompt the cluster has. Neither uses nor changes the known places."""
        return self._opened(namespace, block_bytes=0).contains(hashes, self.config.timeout_s)

    def use(self, space: MemorySpace, prompt: Hashes, absent: Hashes) -> None:
        """Note that a prompt is used, so that its blocks in the server are renewed in the cluster from time to time."""
        first = prompt.index(absent[0]) if absent else len(prompt) - 1
        self._renewals.ask(self.of(space), prompt[first:], wanted=absent)

    def look(self, space: MemorySpace, hashes: Hashes) -> Elsewhere:
        """Which of these blocks the cluster has, up to the first miss. Asks for a few blocks first, then for more."""
        blocks = self.of(space)
        computed = self._computed
        if computed is not None and (position := computed.recall(hashes)) is not None:
            return Elsewhere(frozenset(hashes[:position]), computing=frozenset([hashes[position]]))
        deadline = time.monotonic() + self.config.timeout_s
        found: list[BlockHash] = []
        for part in _growing(hashes):
            answers = blocks.ask(part, max(0.0, deadline - time.monotonic()))
            num_found = next((at for at, is_there in enumerate(answers) if not is_there), len(answers))
            found += part[:num_found]
            if num_found < len(part):
                next_one = part[num_found : num_found + 1]
                if answers[num_found] is None:
                    return self._noted(found, unknown=next_one)
                left_s = deadline - time.monotonic()
                is_computed = computed is not None and computed.ask(blocks, hashes, len(found), left_s)
                return self._noted(found, computing=next_one if is_computed else ())
        return self._noted(found)

    def drop(self, space: MemorySpace, hashes: Hashes) -> int:
        """Drop `hashes`, or the whole namespace if empty. Without known places, `hashes` are taken for a whole prompt.

        For a whole namespace the caller waits only a moment: a cluster may take long to list its keys.
        """
        blocks = self.of(space)
        if not hashes:
            dropping = threading.Thread(target=self._drop_all, args=(blocks,), name="kvtier-cluster-drop", daemon=True)
            dropping.start()
            dropping.join(_DROP_WAIT_S)
            return 0
        known = {block_hash for block_hash in hashes if blocks.places.get(block_hash) is not None}
        num_dropped = blocks.drop([each for each in hashes if each in known], self.config.timeout_s) if known else 0
        if len(known) < len(hashes):
            assumed = self._opened(space.namespace, space.block_bytes)  # assumed places are not remembered
            assumed.learn(hashes)
            unknown = [each for each in hashes if each not in known]
            num_dropped += assumed.drop(unknown, self.config.timeout_s)
        return num_dropped

    def described(self) -> list[DescribedNamespace]:
        """The namespaces that hosts have described; see `describe`."""
        return self._described.known(self.config.timeout_s)

    def describe(self, space: MemorySpace) -> None:
        """The cluster has blocks of `space`: tell other hosts what it covers, unless that was done a while ago.

        Only those of the server's owner: what a tenant says of its own is for its server alone.
        """
        if space.tenant.name or not self._described.is_due(space.namespace):
            return
        fields = self.fields_of(space)
        if fields is not None:
            timeout_s = self.config.timeout_s + _DESCRIBE_S
            self._described.describe(space.namespace, space.name, space.block_tokens, fields, timeout_s)

    def note_loss(self, kind: str, times: int) -> None:
        with self._lock:
            self._losses[kind] += times

    def losses(self) -> dict[str, int]:
        with self._lock:
            return dict(self._losses)

    @property
    def num_nodes_up(self) -> int:
        return len(self._cluster.nodes()) - self._cluster.num_down

    def close(self) -> None:
        self._renewals.close()
        self._cluster.close()

    def _drop_all(self, blocks: ClusterBlocks) -> None:
        try:
            blocks.drop_all(_DROP_S)
        except KvtierError as error:
            self.note_loss("not dropped", 1)
            self._log.warning("drop", "cluster: a namespace was dropped only in part: %s", str(error))

    def _noted(
        self, found: Sequence[BlockHash], unknown: Sequence[BlockHash] = (), computing: Sequence[BlockHash] = ()
    ) -> Elsewhere:
        with self._lock:
            self.num_found += len(found)
        return Elsewhere(frozenset(found), frozenset(unknown), frozenset(computing))

    def _num_places(self) -> int:
        return sum(len(blocks.places) for blocks in self._spaces.values())


def _growing(hashes: Hashes) -> Iterator[Hashes]:
    """Parts of growing size, a small one first: a prompt that is new to all hosts needs no more."""
    first, count = 0, _FIRST_ASKED
    while first < min(len(hashes), _MAX_ASKED):
        yield hashes[first : first + count]
        first, count = first + count, _GROWTH * count
