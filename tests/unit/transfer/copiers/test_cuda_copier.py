"""What a CUDA copier decides without a GPU: groups of layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.layout import KvLayout
from kvtier.transfer.copiers.cuda_copier import layer_groups

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
