"""Prompts are counted for the prefixes with which they begin."""

from __future__ import annotations

from kvtier.blocks.hashing import BlockHash
from kvtier.engine.prefix_uses import PrefixUses

_CHAIN = [BlockHash(bytes([number]) * 32) for number in range(8)]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_prompt_counts_for_each_prefix_it_begins_with_once_it_is_known() -> None:
    clock = Clock()
    uses = PrefixUses(clock)
    uses.note(_CHAIN)
    assert uses.take([_CHAIN[2], _CHAIN[5]]) == []

    uses.note(_CHAIN)
    clock.now = 103.0
    uses.note(_CHAIN[:4])
    uses.note(_CHAIN[:2])
    clock.now = 110.0
    assert sorted(uses.take([_CHAIN[2]])) == [(_CHAIN[2], 2, 7.0), (_CHAIN[5], 1, 10.0)]

    uses.note(_CHAIN)
    assert uses.take([]) == [(_CHAIN[2], 1, 0.0)]
    uses.note(_CHAIN)
    assert uses.take([]) == []
