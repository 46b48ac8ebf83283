"""Loads end where loading on would be slower than computing, as far as that was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.layout import KvLayout
from kvtier.tiers.speeds import Speeds
from kvtier.transfer.decision import LoadOrCompute
from kvtier.transfer.load import Span

_LAYOUT = KvLayout(layers=4, kv_heads=2, head_dim=64, dtype="float32", block_tokens=16)
_PROMPT_TOKENS = 1600


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _decision(
    *,
    token_s: float | None = 1e-3,
    memory_block_s: float | None = None,
    disk_block_s: float | None = None,
    always_loads: bool = False,
    clock: _Clock | None = None,
) -> LoadOrCompute:
    """One that has measured these speeds."""
    decision = LoadOrCompute(Speeds(), _LAYOUT, 512, always_loads=always_loads, clock=clock or _Clock())
    for count in (128, 256, 512):
        if token_s is not None:
            decision.speeds.note_prefill([(0, count)], count * token_s)
        for tier, block_s in (("server", memory_block_s), ("disk", disk_block_s)):
            if block_s is not None:
                decision.note_load(tier, count * _LAYOUT.block_bytes, count * block_s)
    return decision


def _end_of_load(decision: LoadOrCompute, first: int, memory_end: int, disk_end: int, num_tokens: int) -> int:
    """Of a prompt whose first blocks are in a server's memory, and the next ones on its disk."""
    spans = [Span("server", "server", 0, memory_end, None, 0), Span("disk", "server", memory_end, disk_end, None, 0)]
    return decision.end_of_load([span for span in spans if span.first < span.end], first, num_tokens)


@pytest.mark.parametrize(
    ("memory_block_s", "disk_block_s", "expected"),
    [
        (1e-4, 1e-3, 80),  # a block is computed in 16 ms
        (1e-4, 0.1, 60),
        (0.1, 0.1, 0),
        (0.1, 1e-4, 0),  # what is on disk is behind what is in memory
    ],
)
def test_a_load_ends_where_computing_is_faster(memory_block_s: float, disk_block_s: float, expected: int) -> None:
    decision = _decision(memory_block_s=memory_block_s, disk_block_s=disk_block_s)

    assert _end_of_load(decision, 0, 60, 80, _PROMPT_TOKENS) == expected


@pytest.mark.parametrize("unknown", ["token_s", "memory_block_s", "disk_block_s"])
def test_what_was_not_measured_is_loaded_and_so_measured(unknown: str) -> None:
    speeds = {"token_s": 1e-6, "memory_block_s": 1.0, "disk_block_s": 1.0, unknown: None}

    assert _end_of_load(_decision(**speeds), 0, 60, 80, _PROMPT_TOKENS) == 80


def test_with_always_loads_nothing_is_decided() -> None:
    decision = _decision(memory_block_s=1.0, disk_block_s=1.0, always_loads=True)

    assert _end_of_load(decision, 0, 60, 80, _PROMPT_TOKENS) == 80
    assert decision.is_match_worth_it(0, 1)


def test_what_was_slow_is_tried_again_after_a_while() -> None:
    clock = _Clock()
    decision = _decision(memory_block_s=0.1, clock=clock)
    assert _end_of_load(decision, 0, 60, 60, _PROMPT_TOKENS) == 0

    clock.now = 11.0
    assert _end_of_load(decision, 0, 60, 60, _PROMPT_TOKENS) == 60
    assert _end_of_load(decision, 0, 60, 60, _PROMPT_TOKENS) == 0


def test_a_tier_that_has_become_fast_is_used_again() -> None:
    decision = _decision(memory_block_s=0.1)
    for _ in range(5):
        for count in (128, 256, 512):
            decision.note_load("server", count * _LAYOUT.block_bytes, count * 1e-5)

    assert _end_of_load(decision, 0, 60, 60, _PROMPT_TOKENS) == 60


def test_a_match_that_takes_longer_than_computing_is_not_made() -> None:
    decision = _decision()
    for _ in range(5):
        decision.note_match(0.2)

    assert not decision.is_match_worth_it(0, 4)
    assert decision.is_match_worth_it(0, 400)


def test_a_load_may_take_a_little_longer_than_computing_but_not_less_than_the_least() -> None:
    decision = _decision(memory_block_s=1e-4)

    assert decision.timeout_s(0, 100, 1600, 0.5) == pytest.approx(2.4, rel=0.1)
    assert decision.timeout_s(0, 1, 1600, 0.5) == 0.5
    assert _decision(token_s=None).timeout_s(0, 100, 1600, 0.5) > 0.5


@given(
    first=st.integers(0, 100),
    memory_end=st.integers(0, 100),
    num_on_disk=st.integers(0, 100),
    speeds=st.tuples(*[st.one_of(st.none(), st.floats(1e-7, 10.0))] * 3),
)
def test_a_load_never_ends_before_it_begins_or_after_what_is_cached(
    first: int, memory_end: int, num_on_disk: int, speeds: tuple[float | None, float | None, float | None]
) -> None:
    token_s, memory_block_s, disk_block_s = speeds
    decision = _decision(token_s=token_s, memory_block_s=memory_block_s, disk_block_s=disk_block_s)

    end = _end_of_load(decision, first, memory_end, memory_end + num_on_disk, 16 * 220)

    assert first <= end <= max(first, memory_end + num_on_disk)
