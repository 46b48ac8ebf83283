"""Tiles fit the GPU they are for."""

from __future__ import annotations

import pytest

from kvtier.kernels import tuning

HOPPER, AMPERE, ADA = 227 << 10, 163 << 10, 99 << 10


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("shared_bytes", [HOPPER, AMPERE, ADA])
@pytest.mark.parametrize(("head_dim", "itemsize"), [(64, 2), (128, 2), (128, 4), (256, 2)])
@pytest.mark.parametrize("max_query_tokens", [1, 2, 16, 4096])
@pytest.mark.parametrize("group", [1, 7, 8])
@pytest.mark.parametrize("num_rows", [1, 1000])
def test_tiles_fit_shared_memory(
    num_rows: int, group: int, max_query_tokens: int, head_dim: int, itemsize: int, shared_bytes: int
) -> None:
    tiles = tuning.attention_tiles(
        group=group, head_dim=head_dim, itemsize=itemsize, max_query_tokens=max_query_tokens, num_rows=num_rows
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
    tiles = tuning.attention_tiles(group=7, head_dim=128, itemsize=2, max_query_tokens=1, num_rows=40)

    assert tiles.fitted(head_dim=128, itemsize=2, shared_bytes=HOPPER) == tiles


@pytest.mark.parametrize("shared_bytes", [HOPPER, AMPERE, ADA])
@pytest.mark.parametrize("num_tokens", [1, 16, 64])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(16, 16), (128, 8), (3584, 4608), (3584, 37888), (18944, 3584), (29568, 8192)]
)
def test_shares_of_a_product_cover_its_inputs(inputs: int, outputs: int, num_tokens: int, shared_bytes: int) -> None:
    for tile in (
        tuning.fp8_tile(num_tokens=num_tokens, inputs=inputs, outputs=outputs, input_bytes=2),
        tuning.int4_tile(inputs=inputs, outputs=outputs),
    ):
        num_steps = -(-inputs // tile.step)
        share = -(-num_steps // tile.splits)
        assert share * (tile.splits - 1) < num_steps <= share * tile.splits, "none is empty, and none is left"
        stage_bytes = tile.step * (tile.rows + 2 * tuning.few_tokens(num_tokens))
        fitted = tile.fitted(stage_bytes=stage_bytes, shared_bytes=shared_bytes)
        assert fitted.num_stages >= 2
        assert (fitted.num_stages + 1) * stage_bytes <= shared_bytes


@pytest.mark.parametrize(
    ("num_tokens", "input_bytes"), [(1, 2), (4, 2), (1, 1), (4, 1), (16, 1), (32, 1), (64, 1)]
)  # where there are more tokens, they were quantised before
@pytest.mark.parametrize(("inputs", "outputs"), [(3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)])
def test_all_programs_of_a_product_run_at_once(inputs: int, outputs: int, num_tokens: int, input_bytes: int) -> None:
    """Those that are left over run after the others, alone: gate and up took 54 us instead of 39."""
    tile = tuning.fp8_tile(num_tokens=num_tokens, inputs=inputs, outputs=outputs, input_bytes=input_bytes)

    copied = tuning.few_tokens(num_tokens) if input_bytes == 1 else tuning.copied_tokens(num_tokens)
    program_bytes = tile.num_stages * tile.step * (tile.rows + input_bytes * copied)
    assert -(-outputs // tile.rows) * tile.splits <= tuning.programs_at_once(program_bytes)


@pytest.mark.parametrize(("inputs", "outputs"), [(3584, 4608), (3584, 3584), (18944, 3584), (28672, 8192)])
def test_all_programs_of_a_product_in_sixteen_bits_run_at_once(inputs: int, outputs: int) -> None:
    tile = tuning.plain_tile(inputs=inputs, outputs=outputs)

    assert tile is not None
    program_bytes = tile.num_stages * 2 * tile.step * (tile.rows + tuning.MAX_PLAIN_TOKENS)
    num_programs = -(-outputs // tile.rows) * tile.splits
    assert 2 * tuning.MULTIPROCESSORS <= num_programs <= tuning.programs_at_once(program_bytes)


@pytest.mark.parametrize("outputs", [37888, 152064])
def test_a_product_of_many_outputs_in_sixteen_bits_is_left_to_libraries(outputs: int) -> None:
    assert tuning.plain_tile(inputs=3584, outputs=outputs) is None


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("outputs", [4608, 3584, 37888])
def test_a_product_is_split_alike_whoever_quantises_its_inputs(outputs: int, num_tokens: int) -> None:
    """So that its sums are the same to the last bit."""
    sizes = {"num_tokens": num_tokens, "inputs": 3584, "outputs": outputs}
    on_the_way, before = (tuning.fp8_tile(**sizes, input_bytes=count) for count in (2, 1))

    assert (on_the_way.rows, on_the_way.step, on_the_way.splits) == (before.rows, before.step, before.splits)


def test_a_small_product_is_split_until_the_gpu_is_full() -> None:
    tile = tuning.fp8_tile(num_tokens=1, inputs=3584, outputs=3584, input_bytes=2)

    assert 2 * tuning.MULTIPROCESSORS <= 3584 // tile.rows * tile.splits <= tuning.FP8_PROGRAMS
