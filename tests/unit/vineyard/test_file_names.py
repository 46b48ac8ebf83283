"""Where the chunks of a sequence lie: Vineyard's folders, and names that no other sequence has."""

from __future__ import annotations

import random

import mmh3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.vineyard.chunk_files import ChunkName
from kvtier.vineyard.chunk_names import ChunkNames, identity_of

IDENTITY = identity_of(16, 2, 2)


def names_of(tokens: list[int], folder_digits: int = 8) -> list[ChunkName]:
    return ChunkNames(IDENTITY, 2, folder_digits).of(tokens)


def test_folders_are_the_first_digits_of_vineyards_hash_over_all_tokens_so_far() -> None:
    assert [name.folder for name in names_of([1, 2, 3, 4])] == ["c3642e86", "4445ad00"]
    assert [name.folder for name in names_of([1, 2, 3, 4], 2)] == ["c3", "44"]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30))
def test_the_running_hash_is_that_of_the_whole_sequence(tokens: list[int]) -> None:
    for name in names_of(tokens):
        whole = b"".join(token.to_bytes(4, "little") for token in tokens[: 2 * (name.depth + 1)])
        assert name.folder == f"{mmh3.hash(whole, signed=False):08x}"


@given(st.lists(st.integers(0, 9), max_size=40), st.data())
def test_a_sequence_that_comes_in_parts_has_the_names_of_the_whole(tokens: list[int], data: st.DataObject) -> None:
    tokens = tokens[: len(tokens) // 2 * 2]
    names = ChunkNames(IDENTITY, 2, 2)
    at = 0
    while at < len(tokens):
        end = data.draw(st.integers(at // 2 + 1, len(tokens) // 2)) * 2
        chunks = names.continued(tokens[:at], tokens[at:end])
        assert chunks.names == names_of(tokens[:end], 2)
        if data.draw(st.booleans()):
            names.remember(chunks)
        at = end


def test_a_prefix_that_is_remembered_does_not_stand_for_another_of_its_length() -> None:
    names = ChunkNames(IDENTITY, 2, 2)
    names.remember(names.continued([], [1, 2, 3, 4]))

    assert names.continued([1, 2, 3, 5], [6, 7]).names == names_of([1, 2, 3, 5, 6, 7], 2)
    assert names.continued([1, 2, 3, 4], [6, 7]).names == names_of([1, 2, 3, 4, 6, 7], 2)


def test_sequences_whose_folder_hash_collides_have_different_files() -> None:
    seen: dict[str, list[int]] = {}
    dice = random.Random(5)
    while True:
        tokens = [dice.randrange(2**31), dice.randrange(2**31)]
        folder = names_of(tokens)[0].folder
        if seen.setdefault(folder, tokens) != tokens:
            break

    assert names_of(tokens)[0].file_name != names_of(seen[folder])[0].file_name


def test_other_shapes_of_the_same_tokens_have_different_files() -> None:
    digests = {
        ChunkNames(identity_of(*shape), shape[2], 2).of([1, 2, 3, 4])[0].digest
        for shape in [(16, 2, 2), (16, 1, 2), (32, 2, 2), (16, 2, 1), (16, 2, 4)]
    }

    assert len(digests) == 5


@pytest.mark.parametrize("token", [-1, 2**32, "1", 1.5, None])
def test_what_is_no_token_id_is_an_error(token: object) -> None:
    with pytest.raises(ConfigError, match="token ids"):
        names_of([1, token])  # type: ignore[list-item]


def test_what_only_equals_token_ids_is_refused_behind_a_known_sequence_too() -> None:
    names = ChunkNames(IDENTITY, 2, 2)
    names.remember(names.continued([], [1, 2, 3, 4]))

    with pytest.raises(ConfigError, match="token ids must be whole numbers"):
        names.continued([1.0, 2.0, 3.0, 4.0], [5, 6])  # type: ignore[list-item]
    assert len(names.continued([1, 2, 3, 4], [5, 6]).names) == 3
