"""The numbers are SplitMix64's, for every 64-bit seed and position."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine.device.randomness import uniform
from tests.support.examples import examples

MASK = (1 << 64) - 1
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def mix(number: int) -> int:
    """SplitMix64 in whole numbers of any size."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


@settings(max_examples=examples(200), deadline=None)
@given(seed=INT64, position=st.integers(0, 1 << 40))
def test_numbers_are_those_of_the_definition(seed: int, position: int) -> None:
    expected = (mix((seed & MASK) ^ mix(position)) >> 12) / 2**52

    assert uniform(torch.tensor([seed]), torch.tensor([position])).item() == expected


def test_numbers_lie_evenly_between_zero_and_one() -> None:
    numbers = uniform(torch.arange(100)[:, None], torch.arange(1000)[None, :]).flatten()

    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    counts = torch.histc(numbers, bins=50, min=0, max=1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 86  # 0.1% of 49 degrees of freedom
    assert abs(torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1]) < 0.01
