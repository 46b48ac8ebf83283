"""When another host's announcement is asked for again, and when nobody waits for it."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.stores.valkey.announcements import Announcer, ComputedElsewhere
from kvtier.stores.valkey.blocks import ClusterBlocks
from kvtier.stores.valkey.segments import Segments
from kvtier.testing.tier_contract import NAMESPACE, chain
from tests.support.waiting import wait_until


class ToldBlocks(ClusterBlocks):
    """A cluster's announcements without a cluster."""

    def __init__(self) -> None:
        self.announced: set[BlockHash] = set()
        self.num_asked = 0
        self._segments = Segments(4)

    @property
    def namespace(self) -> Namespace:
        return NAMESPACE

    def announce(self, hashes: Sequence[BlockHash], life_s: float, timeout_s: float) -> None:
        self.announced.update(hashes)

    def withdraw(self, hashes: Sequence[BlockHash], timeout_s: float) -> None:
        self.announced.difference_update(hashes)

    def is_announced(self, block_hash: BlockHash, timeout_s: float) -> bool:
        self.num_asked += 1
        return block_hash in self.announced


def test_an_answer_holds_for_a_moment_and_for_prompts_that_have_the_block() -> None:
    now = 100.0
    blocks, computed = ToldBlocks(), ComputedElsewhere(Announcer(), lambda: now)
    hashes = chain(1, 6)
    blocks.announced = {hashes[2]}

    assert computed.recall(hashes) is None
    assert computed.ask(blocks, hashes, 2, 1.0)
    assert computed.recall(hashes) == 2
    assert computed.recall(hashes[:3]) == 2
    assert computed.recall(hashes[:2]) is None
    assert computed.recall([*hashes[:2], *chain(2, 3)]) is None, "a prompt that goes on otherwise"
    assert computed.recall(hashes[1:]) is None
    now += 1.0
    assert computed.recall(hashes) is None


def test_a_block_that_this_process_announces_itself_is_not_waited_for() -> None:
    blocks, announcer = ToldBlocks(), Announcer()
    hashes = chain(1, 2)
    blocks.learn(hashes)
    announcer.announce(blocks, hashes)
    wait_until(lambda: blocks.announced == set(hashes))

    assert not ComputedElsewhere(announcer).ask(blocks, hashes, 0, 1.0)
    assert blocks.num_asked == 0
    announcer.close()
    assert blocks.announced == set()
    announcer.announce(blocks, hashes)
    announcer.close()
    assert blocks.announced == set(), "after its end nothing is announced"


def test_a_block_that_is_no_longer_under_way_after_a_moment_is_never_announced() -> None:
    blocks, announcer = ToldBlocks(), Announcer(delay_s=0.01)
    hashes, slow, unplaced = chain(1, 4), chain(2, 2), chain(3, 2)
    blocks.learn(hashes)
    blocks.learn(slow)
    announcer.announce(blocks, hashes, lambda position: False)
    announcer.announce(blocks, unplaced)
    announcer.announce(blocks, slow)

    wait_until(lambda: blocks.announced == set(slow))
    announcer.end(blocks, slow[:1])
    wait_until(lambda: blocks.announced == set(slow[1:]))
    announcer.close()


def test_more_than_the_bound_is_not_announced() -> None:
    blocks, announcer = ToldBlocks(), Announcer()
    hashes = [BlockHash(number.to_bytes(32, "big")) for number in range(1 << 14)]
    blocks.learn(hashes)
    announcer.announce(blocks, hashes)
    more = chain(1, 4)
    blocks.learn(more)
    announcer.announce(blocks, more)
    wait_until(lambda: len(blocks.announced) == 1 << 14)

    assert blocks.announced == set(hashes)
    announcer.close()
