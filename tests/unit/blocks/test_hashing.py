"""Block identity: the chain of hashes."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from array import array
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks import hashing
from kvtier.blocks.hashing import BlockHash, block_hashes, join_hashes, salted_root, split_hashes
from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError

NAMESPACE = Namespace(bytes(range(32)))
PINNED = [
    "5d3128ecb23511bb8fc8b33f3dfa0703c04dbbef88c7b142d3810cc6ec9d9e56",
    "f16e4edb031447ea793edb3058fda698dfafdef4807df9a00665075bcf463012",
]
PINNED_SALTED = "b906ad7d2d6388a07be8d298ed9d453fda1353d4865be346b61c57e75ebaae80"

token_ids = st.integers(0, 2**32 - 1)
prompts = st.lists(token_ids, max_size=70)
block_sizes = st.integers(1, 17)


def test_hashes_are_the_same_on_every_machine_and_version() -> None:
    assert [found.hex() for found in block_hashes(NAMESPACE, list(range(32)), 16)] == PINNED


@given(prompts, block_sizes)
def test_each_hash_is_a_digest_of_the_one_before_and_its_tokens(tokens: list[int], block_tokens: int) -> None:
    last: bytes = NAMESPACE
    expected = []
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        last = hashlib.sha256(last + struct.pack(f"<{block_tokens}I", *tokens[first : first + block_tokens])).digest()
        expected.append(last)

    assert block_hashes(NAMESPACE, tokens, block_tokens) == expected


@given(st.integers(1, 4), st.integers(0, 300), st.integers(0, 300), st.integers(0, 2))
def test_what_is_known_has_the_same_hashes_as_what_is_new(
    block_tokens: int, num_tokens: int, num_shared: int, first_token: int
) -> None:
    """Prompts that begin like others, of several runs of blocks; few tokens, so that runs come again."""
    tokens = [first_token] + [place % 3 for place in range(num_tokens)]
    tokens[num_shared:] = [token + 1 for token in tokens[num_shared:]]
    last: bytes = NAMESPACE
    expected = []
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        last = hashlib.sha256(last + struct.pack(f"<{block_tokens}I", *tokens[first : first + block_tokens])).digest()
        expected.append(last)

    found = block_hashes(NAMESPACE, tokens, block_tokens)
    assert found == expected
    found.clear()  # it is the caller's
    assert block_hashes(NAMESPACE, tokens, block_tokens) == expected


def test_a_prompt_that_was_hashed_before_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(5000, 9000))
    expected = block_hashes(NAMESPACE, tokens, 16)
    num_hashed = 0

    def sha256(data: bytes) -> object:
        nonlocal num_hashed
        num_hashed += 1
        return hashlib.sha256(data)

    monkeypatch.setattr(hashing, "hashlib", SimpleNamespace(sha256=sha256))

    assert block_hashes(NAMESPACE, tokens, 16) == expected
    assert num_hashed == len(expected) % 64  # not a whole run
    assert block_hashes(Namespace(bytes(32)), tokens, 16) != expected
    assert num_hashed == len(expected) % 64 + len(expected)


@pytest.mark.parametrize(("block_tokens", "num_known"), [(1, 64), (16, 64), (32, 32), (1024, 1), (4096, 1)])
def test_what_is_known_takes_little_room_whatever_the_size_of_blocks(block_tokens: int, num_known: int) -> None:
    hashing._run_hashes.cache_clear()
    block_hashes(NAMESPACE, [7] * (block_tokens * num_known), block_tokens)

    assert hashing._run_hashes.cache_info().currsize == 1


@given(prompts, block_sizes)
def test_only_full_blocks_have_a_hash(tokens: list[int], block_tokens: int) -> None:
    assert len(block_hashes(NAMESPACE, tokens, block_tokens)) == len(tokens) // block_tokens


@given(prompts, block_sizes, st.data())
def test_a_prompt_hashed_in_two_parts_is_the_prompt_hashed_whole(
    tokens: list[int], block_tokens: int, data: st.DataObject
) -> None:
    whole = block_hashes(NAMESPACE, tokens, block_tokens)
    cut = data.draw(st.integers(0, len(whole)))
    parent = whole[cut - 1] if cut else None

    assert whole[:cut] + block_hashes(NAMESPACE, tokens[cut * block_tokens :], block_tokens, parent=parent) == whole


@given(st.lists(token_ids, min_size=8, max_size=8), st.integers(0, 7), token_ids)
def test_a_changed_token_changes_its_block_and_all_after_it_only(tokens: list[int], place: int, token: int) -> None:
    changed = [*tokens[:place], token, *tokens[place + 1 :]]
    before = block_hashes(NAMESPACE, tokens, 2)
    after = block_hashes(NAMESPACE, changed, 2)
    first = place // 2

    assert before[:first] == after[:first]
    assert all((old == new) == (tokens == changed) for old, new in zip(before[first:], after[first:], strict=True))


def test_another_namespace_has_no_hash_in_common() -> None:
    other = Namespace(bytes(32))

    assert not set(block_hashes(NAMESPACE, [1] * 64, 16)) & set(block_hashes(other, [1] * 64, 16))


# --- salts ------------------------------------------------------------------------------------------------------------


def test_salted_roots_are_the_same_on_every_machine_and_version() -> None:
    assert salted_root(NAMESPACE, "tenant").hex() == PINNED_SALTED


def test_without_a_salt_hashes_are_what_they_always_were() -> None:
    assert [found.hex() for found in block_hashes(salted_root(NAMESPACE, ""), list(range(32)), 16)] == PINNED


@given(st.text(), st.text(), st.lists(token_ids, min_size=1, max_size=40))
def test_prompts_share_hashes_exactly_when_their_salts_are_equal(one: str, other: str, tokens: list[int]) -> None:
    mine = block_hashes(salted_root(NAMESPACE, one), tokens, 1)
    its = block_hashes(salted_root(NAMESPACE, other), tokens, 1)

    assert mine == its if one == other else not set(mine) & set(its)


@given(st.text(min_size=1), st.lists(token_ids, min_size=1, max_size=40))
def test_a_root_is_no_blocks_hash_and_no_other_namespaces_root(salt: str, tokens: list[int]) -> None:
    root = salted_root(NAMESPACE, salt)

    assert root not in {NAMESPACE, salted_root(Namespace(bytes(32)), salt)}
    assert root not in block_hashes(NAMESPACE, tokens, 1) + block_hashes(root, tokens, 1)


def test_half_a_character_is_a_salt_too() -> None:
    assert salted_root(NAMESPACE, "\ud800") != salted_root(NAMESPACE, "\ud801")


# --- tokens of any kind -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typecode", ["B", "H", "i", "I", "q", "Q"])
def test_arrays_and_their_views_hash_as_lists_do(typecode: str) -> None:
    tokens = list(range(40))
    expected = block_hashes(NAMESPACE, tokens, 16)

    assert block_hashes(NAMESPACE, array(typecode, tokens), 16) == expected
    assert block_hashes(NAMESPACE, memoryview(array(typecode, tokens)), 16) == expected


def test_tuples_ranges_bytes_and_strided_views_hash_as_lists_do() -> None:
    expected = block_hashes(NAMESPACE, list(range(40)), 16)

    assert block_hashes(NAMESPACE, tuple(range(40)), 16) == expected
    assert block_hashes(NAMESPACE, range(40), 16) == expected
    assert block_hashes(NAMESPACE, bytes(range(40)), 16) == expected
    doubled = array("i", [token for token in range(40) for _ in range(2)])
    assert block_hashes(NAMESPACE, memoryview(doubled)[::2], 16) == expected


def test_a_buffer_that_states_its_byte_order_hashes_as_a_list_does() -> None:
    tokens = (ctypes.c_uint32 * 16)(*range(16))

    assert block_hashes(NAMESPACE, tokens, 16) == block_hashes(NAMESPACE, list(range(16)), 16)


@pytest.mark.parametrize("token", [-1, 2**32, 2**64, 1.5, "7", None])
def test_what_is_no_token_id_is_refused(token: object) -> None:
    with pytest.raises(ConfigError, match="token ids must be whole numbers"):
        block_hashes(NAMESPACE, [1, 2, token], 16)  # type: ignore[list-item]


@pytest.mark.parametrize("tokens", [array("i", [1, -1]), array("Q", [2**32]), array("d", [1.0])])
def test_what_is_no_token_id_is_refused_in_arrays_too(tokens: array[int]) -> None:
    with pytest.raises(ConfigError, match="token ids must be whole numbers"):
        block_hashes(NAMESPACE, tokens, 1)


def test_the_largest_token_id_has_a_hash() -> None:
    assert block_hashes(NAMESPACE, [2**32 - 1], 1) == [
        hashlib.sha256(NAMESPACE + b"\xff\xff\xff\xff").digest(),
    ]


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=5))
def test_joined_hashes_split_into_themselves(hashes: list[BlockHash]) -> None:
    assert split_hashes(join_hashes(hashes)) == hashes
