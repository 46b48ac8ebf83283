from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cacheserver.hit_curve import NUM_SIZES, HitCurve, size_at


def hits_by_size(curve: HitCurve) -> dict[float, float]:
    return {size_at(position): hits for position, hits in enumerate(curve.hits())}


def test_tokens_hit_from_the_size_on_that_holds_them() -> None:
    curve = HitCurve()

    curve.add(16, 32, 10)

    hits = hits_by_size(curve)
    assert hits[8] == hits[16] == 0
    assert hits[24] == pytest.approx(5)
    assert hits[32] == hits[1024] == pytest.approx(10)


def test_old_hits_fade_by_halves() -> None:
    curve = HitCurve()
    curve.add(0, 4, 8)
    curve.fade()
    curve.add(0, 4, 1)

    assert hits_by_size(curve)[4] == pytest.approx(5)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 100)), max_size=20))
def test_the_curve_is_the_sum_of_its_rises(rises: list[tuple[int, int, int]]) -> None:
    curve = HitCurve()
    for begin, width, tokens in rises:
        curve.add(begin, begin + width, tokens)

    for size, hits in hits_by_size(curve).items():
        expected = sum(tokens * min(1.0, max(0.0, (size - begin) / width)) for begin, width, tokens in rises)
        if size < 1e12:
            assert hits == pytest.approx(expected, abs=0.05)


def test_sizes_beyond_the_last_one_count_there() -> None:
    curve = HitCurve()
    curve.add(1 << 60, (1 << 60) + 1, 1)

    assert len(curve.hits()) == NUM_SIZES
    assert curve.hits()[-2] == 0
