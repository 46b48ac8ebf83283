"""Hashes of token sequences, and times of use."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError
from kvtier.vineyard.recency import LocalRecency, _read, _write
from kvtier.vineyard.token_chain import TokenChain

_NAMESPACE = Namespace(bytes(32))
_TOKENS = st.lists(st.integers(0, 3), max_size=12)


@given(st.lists(st.tuples(_TOKENS, _TOKENS), max_size=40))
def test_what_is_remembered_changes_no_hash(sequences):
    chain = TokenChain(_NAMESPACE)
    for prefix, tokens in sequences:
        assert chain.hashes(prefix, tokens) == block_hashes(_NAMESPACE, prefix + tokens, 1)


def test_tokens_come_in_any_sequence():
    expected = block_hashes(_NAMESPACE, [1, 2, 3], 1)
    for tokens in ([1, 2, 3], (1, 2, 3), range(1, 4), array("q", [1, 2, 3]), np.array([1, 2, 3]), b"\1\2\3"):
        assert TokenChain(_NAMESPACE).hashes(tokens) == expected


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], ["a"], [1.5]])
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises(ConfigError):
        TokenChain(_NAMESPACE).hashes(tokens)


def _hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(8, "little") + bytes(24))


def test_a_crowded_table_forgets_what_was_used_longest_ago():
    entries = memoryview(bytearray(16 * 16)).cast("Q")  # sixteen places, eight of which a name may have
    names = [_hash(16 * number + 1) for number in range(9)]
    for time, name in enumerate(names):
        _write(entries, 15, [name], 100 + time)

    assert _read(entries, 15, names) == [0, *range(101, 109)]


def test_a_table_that_is_half_full_has_forgotten_next_to_nothing():
    num_places = 1 << 12
    entries = memoryview(bytearray(16 * num_places)).cast("Q")
    names = block_hashes(_NAMESPACE, range(num_places // 2), 1)
    _write(entries, num_places - 1, names, 1 << 40)

    assert sum(time == 0 for time in _read(entries, num_places - 1, names)) < 8


def test_the_end_of_a_prefix_counts_as_used_first():
    entries = memoryview(bytearray(16 * 16)).cast("Q")
    names = [_hash(number + 1) for number in range(4)]
    _write(entries, 15, names, 100)
    _write(entries, 15, names[:2], 200)

    assert _read(entries, 15, names) == [200, 199, 98, 97]


def test_without_shared_memory_a_process_knows_its_own_use_only():
    recency = LocalRecency(1)
    names = [_hash(number) for number in range(5)]
    recency.touch(names, 1000)

    first, *others = recency.times(names)
    assert first == 0
    assert others == sorted(others, reverse=True)
    assert recency.times([_hash(9)]) == [0]
