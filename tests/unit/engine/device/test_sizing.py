"""How many blocks fit: each engine has a share of the device, and none gets more than there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.engine.device.sizing import DeviceMemory, allocated_bytes, fit_blocks
from kvtier.errors import ConfigError

GIB = 1 << 30
BLOCK_BYTES = 2 << 20


def memory(*, free: int, own: int = 16, step: int = 4, total: int = 80) -> DeviceMemory:
    return DeviceMemory(total_bytes=total * GIB, free_bytes=free * GIB, own_bytes=own * GIB, step_bytes=step * GIB)


def kv_bytes(device: DeviceMemory, share: float) -> int:
    return fit_blocks(device.limits(share), BLOCK_BYTES) * BLOCK_BYTES


def test_alone_an_engine_gets_its_share_less_what_weights_and_a_step_take() -> None:
    assert kv_bytes(memory(free=80 - 16), 0.75) == (60 - 16 - 4) * GIB


def test_beside_another_an_engine_gets_what_it_would_get_alone() -> None:
    other = 36

    assert kv_bytes(memory(free=80 - other - 16), 0.45) == kv_bytes(memory(free=80 - 16), 0.45) == 16 * GIB


def test_two_engines_that_start_at_the_same_time_get_the_same() -> None:
    one = memory(free=80 - 16 - 16)  # the other one has its weights there already, and no KV yet

    assert kv_bytes(one, 0.45) == 16 * GIB


def test_a_share_that_is_larger_than_what_is_free_is_cut_to_that() -> None:
    assert kv_bytes(memory(free=20), 0.9) == (20 - 4) * GIB


def test_no_room_names_what_left_none() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization leaves 0B for KV, but 2 blocks take 4MiB"):
        kv_bytes(memory(free=64), 0.2)
    with pytest.raises(ConfigError, match=r"the free memory of the device leaves 0B for KV, but 2 blocks take 4MiB"):
        kv_bytes(memory(free=3), 0.9)
    with pytest.raises(ConfigError, match=r"kv_cache_space leaves .* for KV"):
        fit_blocks({"kv_cache_space": BLOCK_BYTES, **memory(free=64).limits(0.9)}, BLOCK_BYTES)


def test_kv_cache_space_is_a_limit_like_the_others() -> None:
    assert fit_blocks({"kv_cache_space": GIB, **memory(free=64).limits(0.9)}, BLOCK_BYTES) == GIB // BLOCK_BYTES


@given(
    total=st.integers(1, 1 << 38),
    others=st.integers(0, 1 << 38),
    own=st.integers(0, 1 << 38),
    step=st.integers(0, 1 << 36),
    share=st.floats(0.01, 1.0),
)
def test_no_engine_gets_more_than_its_share_or_than_there_is(
    total: int, others: int, own: int, step: int, share: float
) -> None:
    free = max(0, total - others - own)
    device = DeviceMemory(total_bytes=total, free_bytes=free, own_bytes=own, step_bytes=step)
    try:
        taken = fit_blocks(device.limits(share), BLOCK_BYTES) * BLOCK_BYTES
    except ConfigError:
        return

    assert taken + step <= free
    assert taken + step + own <= total * share


def test_a_cpu_has_nothing_allocated() -> None:
    assert allocated_bytes(torch.device("cpu")) == 0
