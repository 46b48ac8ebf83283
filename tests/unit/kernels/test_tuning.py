"""Tiles fit the GPU they are for."""

from __future__ import annotations

import pytest

from kvtier.kernels import tuning

HOPPER, AMPERE, ADA = 227 << 10, 163 << 10, 99 << 10


@pytest.mark.parametrize("shared_bytes", [HOPPER, AMPERE, ADA])
@pytest.mark.parametrize(("head_dim", "itemsize"), [(64, 2), (128, 2), (128, 4), (256, 2)])
@pytest.mark.parametrize("max_query_tokens", [1, 2, 16, 4096])
@pytest.mark.parametrize("group", [1, 7, 8])
def test_tiles_fit_shared_memory(
    group: int, max_query_tokens: int, head_dim: int, itemsize: int, shared_bytes: int
) -> None:
    tiles = tuning.attention_tiles(
        group=group, head_dim=head_dim, itemsize=itemsize, max_query_tokens=max_query_tokens
    ).fitted(head_dim=head_dim, itemsize=itemsize, shared_bytes=shared_bytes)

    assert tiles.shared_bytes(head_dim, itemsize) <= shared_bytes
    assert tiles.rows >= max(group, tuning.MIN_DOT_ROWS)
    assert tiles.keys >= 16
    assert tiles.num_stages >= 2


@pytest.mark.parametrize("shared_bytes", [HOPPER, AMPERE, ADA])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_of_gathered_keys_fit_and_divide_what_is_gathered(head_dim: int, shared_bytes: int) -> None:
    tiles = tuning.gathered_tiles(group=7, head_dim=head_dim).fitted(
        head_dim=head_dim, itemsize=2, shared_bytes=shared_bytes
    )

    assert tiles.shared_bytes(head_dim, 2) <= shared_bytes
    assert tuning.GATHER_TOKENS % tiles.keys == 0


def test_a_hopper_gpu_gets_the_tiles_that_were_measured_on_one() -> None:
    tiles = tuning.attention_tiles(group=7, head_dim=128, itemsize=2, max_query_tokens=1)

    assert tiles.fitted(head_dim=128, itemsize=2, shared_bytes=HOPPER) == tiles
