"""What a CUDA copier decides without a GPU: groups of layers, and which copies are fast."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.layout import KvLayout
from kvtier.engine.cuda_copier import by_speed, layer_groups
from kvtier.memory.cuda import Copies, Cudart, Registration
from kvtier.memory.mapped import MappedArena
from tests.unit.memory.fake_cudart import FakeLibrary

PIECE_BYTES = 1 << 20
PART_BYTES = 128 << 10


@given(st.integers(1, 80), st.integers(1, 8), st.integers(1, 9))
def test_groups_are_all_layers_in_order_and_whole(layers: int, kv_heads: int, num_groups: int) -> None:
    layout = KvLayout(layers=layers, kv_heads=kv_heads, head_dim=128)
    groups = layer_groups(layout, num_groups)

    next_layer = next_byte = 0
    for group in groups:
        assert (group.first_layer, group.first_byte) == (next_layer, next_byte)
        assert group.nbytes == group.num_layers * layout.block_bytes // layers > 0
        next_layer += group.num_layers
        next_byte += group.nbytes
    assert (next_layer, next_byte) == (layers, layout.block_bytes)
    assert len(groups) <= num_groups
    assert max(g.num_layers for g in groups) - min(g.num_layers for g in groups) <= 1


@pytest.mark.parametrize(
    ("layers", "kv_heads", "asked", "expected"),
    [(28, 4, 4, [7, 7, 7, 7]), (36, 2, 4, [9, 9, 9, 9]), (31, 4, 2, [15, 16]), (7, 1, 4, [7]), (1, 8, 4, [1])],
)
def test_groups_are_even_and_not_small(layers: int, kv_heads: int, asked: int, expected: list[int]) -> None:
    groups = layer_groups(KvLayout(layers=layers, kv_heads=kv_heads, head_dim=128), asked)

    assert [group.num_layers for group in groups] == expected
    assert len(groups) == 1 or min(group.nbytes for group in groups) >= PART_BYTES


def test_copies_are_fast_as_far_as_memory_is_registered_and_cut_at_pieces() -> None:
    library = FakeLibrary()
    library.max_registered_pieces = 1
    with contextlib.closing(MappedArena.create(2 * PIECE_BYTES)) as arena:
        registration = Registration(arena, Cudart(library), 0, PIECE_BYTES)
        registration.wait(10)
        offsets = [0, PIECE_BYTES - 100, PIECE_BYTES + 5000]

        fast, slow = by_speed([10_000, 20_000, 30_000], offsets, 300, arena.address, PIECE_BYTES, registration)

        at = arena.address
        assert fast == Copies.of([10_000, 20_000], [at, at + PIECE_BYTES - 100], [300, 100])
        assert slow == Copies.of([20_100, 30_000], [at + PIECE_BYTES, at + PIECE_BYTES + 5000], [200, 300])
        registration.close()


def test_a_registered_arena_makes_every_copy_fast() -> None:
    with contextlib.closing(MappedArena.create(2 * PIECE_BYTES)) as arena:
        registration = Registration(arena, Cudart(FakeLibrary()), 0, PIECE_BYTES)
        assert registration.wait(10)

        for offsets, expected in (([0, 900], [500, 500]), ([PIECE_BYTES - 250], [250, 250])):
            fast, slow = by_speed([1] * len(offsets), offsets, 500, arena.address, PIECE_BYTES, registration)
            assert list(fast.sizes) == expected
            assert not slow.sizes
        registration.close()


def test_an_arena_that_is_not_registered_is_cut_too() -> None:
    fast, slow = by_speed([7], [PIECE_BYTES - 1], 3, 1 << 40, PIECE_BYTES, None)

    assert not fast.sizes
    assert list(slow.sizes) == [1, 2]
