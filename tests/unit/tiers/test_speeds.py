"""Lines through measurements, and what they foretell."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.speeds import Fit, Speeds


def test_nothing_is_known_before_anything_was_measured() -> None:
    speeds = Speeds()

    assert Fit(2).seconds((1.0, 1.0)) is None
    assert speeds.load_s("host", 1000) is None
    assert speeds.prefill_s(0, 10, 100) is None


def test_no_tokens_take_no_time_even_when_nothing_is_known() -> None:
    assert Speeds().prefill_s(5, 0, 100) == 0.0


def test_a_line_is_found_from_two_sizes() -> None:
    fit = Fit(2)
    for size in (1.0, 10.0, 1.0, 10.0):
        fit.note((1.0, size), 0.5 + 0.2 * size)

    assert fit.seconds((1.0, 5.0)) == pytest.approx(1.5, rel=0.01)


def test_what_was_measured_at_one_size_grows_with_the_size() -> None:
    speeds = Speeds()
    for _ in range(3):
        speeds.note_load("host", 10_000_000, 0.01)

    assert speeds.load_s("host", 10_000_000) == pytest.approx(0.01, rel=0.02)
    assert speeds.load_s("host", 20_000_000) == pytest.approx(0.02, rel=0.05)


def test_newer_measurements_count_more() -> None:
    speeds = Speeds()
    for _ in range(50):
        speeds.note_load("server", 10_000_000, 1.0)
    for _ in range(50):
        speeds.note_load("server", 10_000_000, 0.1)

    assert speeds.load_s("server", 10_000_000) == pytest.approx(0.1, rel=0.1)


def test_tiers_are_measured_apart() -> None:
    speeds = Speeds()
    speeds.note_load("host", 1_000_000, 0.001)
    speeds.note_load("server", 1_000_000, 0.1)

    host, server = speeds.load_s("host", 1_000_000), speeds.load_s("server", 1_000_000)
    assert host is not None
    assert server is not None
    assert server > 50 * host
    assert speeds.load_s("disk", 1_000_000) is None


def test_a_long_prompt_takes_a_step_for_each_chunk() -> None:
    speeds = Speeds()
    for count in (100, 1000, 100, 1000):
        speeds.note_prefill([(0, count)], 0.01 + count / 1e4)

    whole, cut = speeds.prefill_s(0, 1000, 1000), speeds.prefill_s(0, 1000, 100)
    assert whole is not None
    assert cut is not None
    assert whole == pytest.approx(0.11, rel=0.05)
    assert cut > whole


@given(
    measured=st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 1e3)), min_size=1, max_size=30),
    nbytes=st.integers(0, 10**10),
)
def test_a_load_never_takes_less_than_no_time(measured: list[tuple[int, float]], nbytes: int) -> None:
    speeds = Speeds()
    for size, seconds in measured:
        speeds.note_load("host", size, seconds)

    seconds_to_come = speeds.load_s("host", nbytes)
    assert seconds_to_come is not None
    assert 0.0 <= seconds_to_come < math.inf


@given(
    fixed=st.floats(1e-5, 1e-1),
    slope=st.floats(1e-3, 10.0),
    sizes=st.lists(
        st.integers(10**5, 10**9), min_size=2, max_size=20, unique_by=lambda nbytes: math.frexp(nbytes / 1e8)[1]
    ),
)
def test_exact_measurements_are_foretold(fixed: float, slope: float, sizes: list[int]) -> None:
    speeds = Speeds()
    for size in sizes:
        speeds.note_load("host", size, fixed + slope * size / 1e8)

    foretold = speeds.load_s("host", sizes[-1])
    assert foretold == pytest.approx(fixed + slope * sizes[-1] / 1e8, rel=0.1)


@given(chunks=st.lists(st.tuples(st.integers(0, 10**5), st.integers(1, 10**4)), min_size=1, max_size=20))
def test_a_prefill_never_takes_less_than_no_time(chunks: list[tuple[int, int]]) -> None:
    speeds = Speeds()
    for first, count in chunks:
        speeds.note_prefill([(first, count)], 1e-3 + count / 1e5)

    seconds = speeds.prefill_s(0, 5000, 512)
    assert seconds is not None
    assert seconds >= 0.0


def test_many_small_steps_say_nothing_new_of_large_ones() -> None:
    speeds = Speeds()
    for _ in range(5):
        speeds.note_prefill([(0, 512)], 0.05)
    for _ in range(1000):
        speeds.note_prefill([(500, 16)], 0.004)

    assert speeds.prefill_s(0, 512, 512) == pytest.approx(0.05, rel=0.1)
    assert speeds.prefill_s(500, 16, 512) == pytest.approx(0.004, rel=0.1)


def test_one_that_was_held_up_does_not_count_for_long() -> None:
    speeds = Speeds()
    speeds.note_load("server", 64_000_000, 20.0)
    for _ in range(100):
        speeds.note_load("server", 8_000_000, 0.0017)

    assert speeds.load_s("server", 8_000_000) == pytest.approx(0.0017, rel=0.5)

    for _ in range(3):
        speeds.note_load("server", 64_000_000, 0.013)
    assert speeds.load_s("server", 64_000_000) == pytest.approx(0.013, rel=0.5)
