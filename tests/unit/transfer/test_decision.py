"""The decision between loading and computing: what it makes of a prompt's last block."""

from __future__ import annotations

import pytest

from kvtier.blocks.layout import KvLayout
from kvtier.tiers.speeds import Speeds
from kvtier.transfer.decision import LoadOrCompute
from kvtier.transfer.load import Load, LoadPlan, Order, Span
from tests.support.host_device import Arrived, Past

LAYOUT = KvLayout(layers=16, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16)
NUM_BLOCKS = 256
PROMPT_TOKENS = NUM_BLOCKS * LAYOUT.block_tokens


class Decision:
    """With a tier "disk" that loads about as fast as the engine computes, and a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        speeds = Speeds()
        for _ in range(3):
            for num_tokens, seconds in ((32, 0.005), (256, 0.008), (1024, 0.032)):
                speeds.note_prefill([(0, num_tokens)], seconds)
            speeds.note_prefill([(8192, 1024)], 0.040)
            for num_blocks in (16, 64, 256, 512):
                speeds.note_load("disk", num_blocks * LAYOUT.block_bytes, 0.001 + num_blocks * 0.0006)
        self.speeds = speeds
        self.decides = LoadOrCompute(speeds, LAYOUT, 8192, always_loads=False, clock=lambda: self.now)

    def plan(self, position: int, end: int = NUM_BLOCKS) -> LoadPlan | None:
        return self.decides.plan([Span("disk", "server", 0, end, None, 0)], position, PROMPT_TOKENS)


@pytest.fixture
def decision() -> Decision:
    return Decision()


def test_what_meets_from_the_back_leaves_out_the_block_of_the_last_token(decision: Decision) -> None:
    plan = decision.plan(0)

    assert plan is not None
    assert (plan.order, plan.first, plan.end) == (Order.BACK, 0, NUM_BLOCKS - 1)
    assert plan.expected_s == decision.speeds.load_s("disk", (NUM_BLOCKS - 1) * LAYOUT.block_bytes)


def test_the_last_block_is_never_tried_to_see_whether_a_tier_has_become_fast(decision: Decision) -> None:
    """It costs nothing to compute, so every load of it is late, and the tier would be left alone by all."""
    for now in (0.0, 5.0, 11.0, 25.0):
        decision.now = now
        assert decision.plan(NUM_BLOCKS - 1) is None
    assert decision.plan(0) is not None


def test_a_tier_that_was_slow_is_tried_again_with_more_than_the_last_block(decision: Decision) -> None:
    for _ in range(30):
        decision.speeds.note_load("disk", NUM_BLOCKS * LAYOUT.block_bytes, 60.0)
    assert decision.plan(0) is None
    decision.now = 11.0
    assert decision.plan(NUM_BLOCKS - 1) is None
    retried = decision.plan(0)

    assert retried is not None


@pytest.mark.parametrize(("token_s", "soon_s", "late_s"), [(1e-3, 2.0, 5.0), (1e-6, 0.2, 0.3)])
def test_the_first_load_from_a_tier_has_the_time_of_computing_and_a_quarter_of_a_second_at_least(
    token_s: float, soon_s: float, late_s: float
) -> None:
    """A load right after a restart starts slowly; at that pace, the rest would be computed sooner."""
    now = 0.0
    speeds = Speeds()
    for num_tokens in (256, 1024, 4096):
        speeds.note_prefill([(0, num_tokens)], num_tokens * token_s)
    decides = LoadOrCompute(speeds, LAYOUT, 8192, always_loads=False, clock=lambda: now)
    plan = decides.plan([Span("disk", "server", 0, NUM_BLOCKS, None, 0)], 0, PROMPT_TOKENS + 1)
    assert plan is not None
    load = Load(plan, [], [0] * NUM_BLOCKS, Past(), now)
    load.take(32)
    load.write(0, 32, Arrived)

    now = soon_s
    assert not decides.is_late(load, PROMPT_TOKENS + 1, 0.0, 1)
    now = late_s
    assert decides.is_late(load, PROMPT_TOKENS + 1, 0.0, 1)


def test_blocks_of_an_unknown_prompt_take_as_long_as_they_take_alone(decision: Decision) -> None:
    alone = decision.speeds.prefill_s(0, 2 * LAYOUT.block_tokens, 8192)

    assert decision.decides.compute_s(0, 2, None) == alone
    of_a_prompt = decision.decides.compute_s(0, 2, 2 * LAYOUT.block_tokens)
    assert alone is not None
    assert of_a_prompt is not None
    assert of_a_prompt < alone, "its last token is computed in any case"
