"""The shape and size of a block."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.blocks.layout import DTYPE_BYTES, SLOT_ALIGN_BYTES, KvLayout, OpaqueLayout, slot_bytes_of
from kvtier.errors import ConfigError


def layout(**changes: object) -> KvLayout:
    fields: dict[str, object] = {"layers": 28, "kv_heads": 8, "head_dim": 128}
    return KvLayout(**(fields | changes))  # type: ignore[arg-type]


def test_a_block_holds_k_and_v_of_every_token_head_and_layer() -> None:
    assert layout().block_bytes == 28 * 8 * 16 * 2 * 128 * 2
    assert layout().shape == (28, 8, 16, 256)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_shape_and_an_itemsize_make_the_blocks_bytes(dtype: str) -> None:
    made = layout(dtype=dtype)
    layers, heads, tokens, width = made.shape

    assert made.block_bytes == layers * heads * tokens * width * made.itemsize


@pytest.mark.parametrize(
    ("block_bytes", "slot_bytes"),
    [(1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (10_240, 12_288)],
)
def test_a_slot_is_a_block_rounded_up_to_direct_io(block_bytes: int, slot_bytes: int) -> None:
    assert slot_bytes_of(block_bytes) == slot_bytes
    assert slot_bytes % SLOT_ALIGN_BYTES == 0


def test_a_layouts_slot_is_the_slot_of_its_block() -> None:
    made = layout(layers=2, kv_heads=1, head_dim=80)

    assert (made.block_bytes, made.slot_bytes) == (10_240, 12_288)


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "block_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "16", None])
def test_a_count_that_is_not_a_positive_whole_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a positive whole number"):
        layout(**{name: value})


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"bfloat16.*not 'int4'"):
        layout(dtype="int4")


def test_equal_fields_are_an_equal_layout() -> None:
    assert layout() == layout()
    assert len({layout(), layout(), layout(dtype="float16")}) == 2


def test_an_opaque_block_has_as_many_bytes_as_it_says() -> None:
    layout = OpaqueLayout(nbytes=5000, block_tokens=32)

    assert (layout.block_bytes, layout.slot_bytes, layout.itemsize) == (5000, 8192, 1)


@pytest.mark.parametrize("wrong", [{"nbytes": 0}, {"nbytes": 1.5}, {"nbytes": True}, {"block_tokens": 0}])
def test_an_opaque_block_without_bytes_or_tokens_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        OpaqueLayout(**{"nbytes": 100, "block_tokens": 16, **wrong})
