"""Prefixes found by an engine's own hashes: hashed once, and known to be in the cache for a while."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.namespace import Namespace
from kvtier.transfer.known_prefixes import KnownPrefixes
from kvtier.transfer.lookup import Described

_ROOT = Namespace(bytes(32))
_OTHER_ROOT = Namespace(bytes([1]) * 32)
_BLOCK_TOKENS = 16


def _pages(tokens: Sequence[int], page_tokens: int) -> list[bytes]:
    """As an engine hashes them: chained, and unlike our own."""
    last, hashes = b"engine", []
    for first in range(0, len(tokens) // page_tokens * page_tokens, page_tokens):
        last = hashlib.sha256(last + repr(tokens[first : first + page_tokens]).encode()).digest()
        hashes.append(last)
    return hashes


@dataclass
class Bench:
    page_tokens: int = 16
    algorithm: str = "sha256"
    now: float = 1000.0
    num_hashed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = KnownPrefixes(self.page_tokens, _BLOCK_TOKENS, self.algorithm, clock=lambda: self.now)

    def pages(self, tokens: Sequence[int]) -> list[bytes]:
        return _pages(tokens, self.page_tokens)

    def describe(self, tokens: Sequence[int], root: Namespace = _ROOT) -> Described:
        def hash_rest(first: int, parent: BlockHash | None) -> list[BlockHash]:
            rest = block_hashes(root, tokens[first * _BLOCK_TOKENS :], _BLOCK_TOKENS, parent=parent)
            self.num_hashed.append(len(rest))
            return rest

        return self.known.describe(root, self.pages(tokens), hash_rest)

    def is_fresh(self, tokens: Sequence[int], root: Namespace = _ROOT) -> bool:
        return self.known.fresh(root, self.pages(tokens)) is not None

    def num_stored(self, tokens: Sequence[int], root: Namespace = _ROOT) -> int:
        return self.known.num_stored(root, self.pages(tokens))

    def store(self, tokens: Sequence[int], num_blocks: int, *, is_asked: bool = True) -> None:
        self.known.note_stored(_ROOT, self.pages(tokens), num_blocks, is_asked=is_asked)


def _tokens(num_blocks: int, seed: int = 0, more: int = 5) -> list[int]:
    return [seed * 100_000 + number for number in range(num_blocks * _BLOCK_TOKENS + more)]


@pytest.mark.parametrize("page_tokens", [8, 16, 128])
def test_the_same_prompt_is_hashed_once(page_tokens: int) -> None:
    bench, tokens = Bench(page_tokens), _tokens(64)

    first, again = bench.describe(tokens), bench.describe(tokens)

    assert first == again
    assert first.hashes == block_hashes(_ROOT, tokens, _BLOCK_TOKENS)
    assert bench.num_hashed == [64, 0]


def test_of_a_prompt_that_begins_as_another_only_the_rest_is_hashed() -> None:
    bench = Bench()
    shared, one, other = _tokens(50, more=0), _tokens(30, seed=1), _tokens(20, seed=2)
    bench.describe(shared + one)

    assert bench.describe(shared + other).hashes == block_hashes(_ROOT, shared + other, _BLOCK_TOKENS)
    assert bench.num_hashed == [80, 22], "what is known ends at the last eighth page"
    bench.describe(shared + other)
    bench.describe(shared + one)
    assert bench.num_hashed[2:] == [0, 0]


def test_a_prompt_of_another_root_has_hashes_of_its_own() -> None:
    bench, tokens = Bench(), _tokens(20)
    bench.describe(tokens)

    assert bench.describe(tokens, _OTHER_ROOT).hashes == block_hashes(_OTHER_ROOT, tokens, _BLOCK_TOKENS)
    assert bench.describe(tokens).hashes == block_hashes(_ROOT, tokens, _BLOCK_TOKENS)


def test_hashes_that_may_collide_name_nothing() -> None:
    bench, tokens = Bench(algorithm="xxhash"), _tokens(20)

    for _ in range(2):
        bench.describe(tokens)
    bench.store(tokens, 20)

    assert bench.num_hashed == [20, 20]
    assert not bench.is_fresh(tokens)


def test_the_oldest_prefixes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.transfer.known_prefixes._MAX_BLOCKS", 100)
    bench = Bench()
    for seed in (1, 2, 1, 3):
        bench.describe(_tokens(40, seed))

    for seed in (1, 3, 2):
        bench.describe(_tokens(40, seed))

    assert bench.num_hashed == [40, 40, 0, 40, 0, 0, 40]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 60)), max_size=12))
def test_whatever_came_before_hashes_are_right(prompts: list[tuple[int, int, int]]) -> None:
    bench = Bench()
    for seed, num_shared, num_own in prompts:
        tokens = _tokens(num_shared, more=0) + _tokens(num_own, seed + 1)
        assert bench.describe(tokens).hashes == block_hashes(_ROOT, tokens, _BLOCK_TOKENS)


def test_what_is_stored_is_fresh_for_a_while_and_its_beginnings_too() -> None:
    bench, tokens = Bench(), _tokens(64)
    bench.describe(tokens)
    assert not bench.is_fresh(tokens)

    bench.store(tokens, 64)

    assert bench.is_fresh(tokens)
    assert bench.is_fresh(tokens[: 40 * _BLOCK_TOKENS])
    assert not bench.is_fresh(tokens, _OTHER_ROOT)
    assert not bench.is_fresh(_tokens(64, seed=1))
    bench.now += 61
    assert not bench.is_fresh(tokens)


def test_what_is_not_stored_in_whole_is_not_fresh() -> None:
    bench, tokens = Bench(), _tokens(64)
    bench.describe(tokens)

    bench.store(tokens, 24)

    assert not bench.is_fresh(tokens)
    assert bench.is_fresh(tokens[: 24 * _BLOCK_TOKENS])


def test_what_is_stored_of_a_prompt_is_known_for_a_while() -> None:
    bench, tokens = Bench(), _tokens(61)
    bench.describe(tokens)
    assert bench.num_stored(tokens) == 0

    bench.store(tokens, 59)

    assert bench.num_stored(tokens) == 59
    assert bench.num_stored(tokens[: 40 * _BLOCK_TOKENS]) == 40
    assert bench.num_stored(tokens[: 45 * _BLOCK_TOKENS]) == 40, "what is known ends at the last eighth page"
    assert bench.num_stored(tokens, _OTHER_ROOT) == 0
    assert bench.num_stored(_tokens(61, seed=1)) == 0
    bench.now += 61
    assert bench.num_stored(tokens) == 0


def test_what_a_prompt_has_stored_says_nothing_of_another_beyond_what_they_share() -> None:
    bench, shared = Bench(), _tokens(40, more=0)
    one, other = shared + _tokens(20, 1), shared + _tokens(4, 2)
    bench.describe(one)
    bench.store(one, 40)
    bench.describe(other)

    bench.store(other, 44)
    assert bench.num_stored(one) == 40
    assert bench.is_fresh(other)

    bench.store(one, 60)
    bench.store(other, 44, is_asked=False)
    assert bench.num_stored(one) == 60


def test_new_ends_of_a_prefix_do_not_keep_it_fresh() -> None:
    """Else the cache would never be asked for what the engine always has, and would lose it."""
    bench, shared = Bench(), _tokens(40, more=0)
    bench.describe(shared)
    bench.store(shared, 40)
    for seed in range(1, 8):
        bench.now += 10
        prompt = shared + _tokens(20, seed)
        bench.describe(prompt)
        bench.store(prompt, 60, is_asked=False)

    assert not bench.is_fresh(shared)


def test_when_the_cache_is_emptied_nothing_is_fresh() -> None:
    bench, tokens = Bench(), _tokens(20)
    bench.describe(tokens)
    bench.store(tokens, 20)

    bench.known.forget_stored()

    assert not bench.is_fresh(tokens)
