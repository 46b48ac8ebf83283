"""Pages that are held while they are saved: each goes back to vLLM's pool."""

from __future__ import annotations

import pytest
from vllm.v1.core.block_pool import BlockPool

from kvtier.plugins.vllm.pins import Pins


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_gpu_blocks=17, enable_caching=True, hash_block_size=16)


@pytest.fixture
def pins(pool: BlockPool) -> Pins:
    pins = Pins()
    pins.bind(pool)
    return pins


def _taken(pool: BlockPool, count: int) -> list[int]:
    return [block.block_id for block in pool.get_new_blocks(count)]


def test_held_pages_are_free_when_their_request_and_their_save_have_let_go(pool: BlockPool, pins: Pins) -> None:
    pages = _taken(pool, 3)
    num_free = pool.get_num_free_blocks()

    assert pins.hold(1, pages)
    pool.free_blocks([pool.blocks[page] for page in pages])
    assert pool.get_num_free_blocks() == num_free
    pins.release(1)

    assert pool.get_num_free_blocks() == num_free + 3
    assert pins.num_saves == 0


def test_a_save_without_pages_leaves_nothing_behind(pins: Pins) -> None:
    assert all(pins.hold(number, []) for number in range(10))
    assert pins.num_saves == 0


def test_at_most_half_of_the_pool_is_held(pool: BlockPool, pins: Pins) -> None:
    pages = _taken(pool, 10)

    assert pins.hold(1, pages[:8])
    assert not pins.hold(2, pages[8:])
    pins.release(1)
    assert pins.hold(2, pages[8:])
