"""A trace through a server's memory and disk, against what is counted by hand."""

from __future__ import annotations

import dataclasses

import pytest

from kvtier.blocks.policies import LruPolicy
from kvtier.planning.reuse import uses_of
from kvtier.simulate.costs import Costs
from kvtier.simulate.replay import replay
from kvtier.simulate.shapes import GPUS, shape_of
from kvtier.simulate.tiers import TieredReplay, TierSettings, replay_tiers
from kvtier.simulate.trace import TracedRequest
from tests.support.prompt_traffic import sessions

SHAPE = shape_of("qwen2.5-7b")
BLOCK_BYTES = 512 * SHAPE.kv_bytes
MEMORY_S = BLOCK_BYTES / GPUS["h200"].host_bytes_per_s
DISK_S = BLOCK_BYTES / 5e9
COSTS = Costs(SHAPE, GPUS["h200"], 5e9, prefill_tokens_per_s=512.0)
"""A block takes a second to compute."""
TRAFFIC = [
    TracedRequest(10.0 * number, 512 * len(prompt), 9, prompt) for number, prompt in enumerate(sessions(12, 12, seed=3))
]


def asked(*prompts: tuple[int, ...], every_s: float = 1.0) -> list[TracedRequest]:
    return [TracedRequest(every_s * turn, 512 * len(prompt), 1, prompt) for turn, prompt in enumerate(prompts)]


def replayed(requests: list[TracedRequest], memory: int, disk: int = 0, **given: object) -> TieredReplay:
    return replay_tiers(requests, TierSettings(memory, disk, **{"eviction": "lru", **given}), COSTS)  # type: ignore[arg-type]


def test_a_prompt_in_memory_takes_its_load_and_its_last_token() -> None:
    result = replayed(asked((1, 2), (1, 2), (1, 2, 3)), 8)

    assert (result.memory_tokens, result.disk_tokens, result.input_tokens) == (4 * 512, 0, 7 * 512)
    assert result.ttfts_s == pytest.approx([2 * MEMORY_S + 1 / 512, 2 * MEMORY_S + 1, 2.0])
    assert result.saved_gpu_s == pytest.approx(2 - 1 / 512 + 2)
    assert (result.memory_bytes_written, result.disk_bytes_written) == (3 * BLOCK_BYTES, 0)


def test_what_has_left_memory_comes_from_disk_and_is_in_memory_again() -> None:
    result = replayed(asked((1, 2), (3, 4), (1, 2), (1, 2)), 2, 8)

    assert (result.memory_tokens, result.disk_tokens) == (2 * 512, 2 * 512)
    assert result.hit_rate == 0.5
    assert result.ttfts_s == pytest.approx([2 * MEMORY_S + 1 / 512, 2 * DISK_S + 1 / 512, 2.0, 2.0])
    assert result.disk_bytes_written == 4 * BLOCK_BYTES
    assert result.memory_bytes_written == 6 * BLOCK_BYTES  # two of them from disk


def test_what_is_slower_to_load_than_to_compute_is_computed() -> None:
    slow = dataclasses.replace(COSTS, disk_bytes_per_s=BLOCK_BYTES / 2)
    requests = asked((1, 2), (3, 4), (1, 2))

    result = replay_tiers(requests, TierSettings(2, 8, "lru"), slow)

    assert (result.memory_tokens, result.disk_tokens) == (0, 0)
    assert result.ttfts_s == [2.0, 2.0, 2.0]


def test_a_disk_is_read_no_faster_than_memory() -> None:
    fast = dataclasses.replace(COSTS, disk_bytes_per_s=1e15)

    result = replay_tiers(asked((1, 2), (3, 4), (1, 2)), TierSettings(2, 8, "lru"), fast)

    assert result.ttfts_s[0] == pytest.approx(2 * MEMORY_S + 1 / 512)


def test_a_disk_that_is_full_forgets_what_was_used_least_recently() -> None:
    result = replayed(asked((1,), (2,), (3,), (4,), (2,), (1,)), 1, 3)

    assert result.disk_tokens == 512


def test_a_disk_that_stores_on_reuse_gets_nothing_else() -> None:
    result = replayed(asked((1, 2), (1, 2), (3, 4), (5, 6), (1, 2), (3, 4)), 2, 8, stores_on="reuse")

    assert result.disk_bytes_written == 2 * BLOCK_BYTES
    assert (result.memory_tokens, result.disk_tokens) == (2 * 512, 2 * 512)


def test_over_its_budget_a_disk_gets_what_is_used_again() -> None:
    """An hour's writes are four blocks: new ones get them until half are gone, what is used again gets the last."""
    prompts = [(1,), (2,), (3,), (4,), (4,), (5,), (5,), (6,), (6,)]

    result = replayed(asked(*prompts, every_s=0.0), 16, 16, disk_writes_per_day=24 * 4 * BLOCK_BYTES)

    assert result.num_withheld_blocks == 3
    assert result.disk_bytes_written == 4 * BLOCK_BYTES


def test_what_is_about_to_leave_memory_goes_to_a_disk_that_is_short_of_writes() -> None:
    prompts = [(number,) for number in range(1, 9)]

    result = replayed(asked(*prompts, every_s=2.0), 4, 16, disk_writes_per_day=24 * 8 * BLOCK_BYTES)

    assert result.num_withheld_blocks == 3
    assert result.disk_bytes_written == 8 * BLOCK_BYTES


def test_the_times_are_a_distribution() -> None:
    result = replayed(asked(*((number,) * 1 for number in range(10)), (0, 20, 21)), 64)

    assert result.ttft_s(0.5) == 1.0
    assert result.ttft_s(0.99) == pytest.approx(2 + MEMORY_S)
    assert result.mean_ttft_s == pytest.approx((12 + MEMORY_S) / 11)
    assert replayed([], 4).ttft_s(0.5) == replayed([], 4).mean_ttft_s == replayed([], 4).hit_rate == 0.0


@pytest.mark.parametrize("size", [3, 8, 30, 100, 400])
def test_lru_in_memory_is_the_exact_curve(size: int) -> None:
    expected = sum(512 * use.hit_blocks(size) for use in uses_of(TRAFFIC))

    assert replayed(TRAFFIC, size).memory_tokens == expected
    assert replay(TRAFFIC, size, lambda clock: LruPolicy()).hit_tokens == expected


@pytest.mark.parametrize(("memory", "disk"), [(200, 400), (250, 600)])
def test_lru_with_a_disk_is_the_exact_curve_of_each(memory: int, disk: int) -> None:
    """As long as a prompt fits into memory: what is read from disk has to pass through it."""
    uses = uses_of(TRAFFIC)
    result = replayed(TRAFFIC, memory, disk)

    assert result.memory_tokens == sum(512 * use.hit_blocks(memory) for use in uses)
    assert result.memory_tokens + result.disk_tokens == sum(512 * use.hit_blocks(disk) for use in uses)


def test_memory_above_a_disk_lets_all_that_is_new_through_to_it() -> None:
    """A loop that memory cannot hold: what the adaptive policy would rather not keep there is on disk all the same."""
    loop = asked(*[tuple(range(10 * prompt, 10 * prompt + 10)) for prompt in range(20)] * 4, every_s=5.0)

    assert replayed(loop, 50, 400, eviction="adaptive").hit_rate == pytest.approx(0.75)
