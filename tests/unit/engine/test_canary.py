"""What the canary says about a wrong block."""

from __future__ import annotations

import pytest

from kvtier.engine.canary import Finding
from kvtier.engine.device.kv_comparison import Excess


@pytest.mark.parametrize(
    ("position", "deviation", "sentence"),
    [
        (0, 0.25, "block 0 of a prompt is wrong: it is off by 25% in layer 3, 12.5 times what rounding explains"),
        (
            40,
            0.25,
            "block 40 of a prompt, or one before it, is wrong: it is off by 25% in layer 3, 12.5 times what rounding "
            "explains",
        ),
        (0, float("nan"), "block 0 of a prompt is wrong: it has values in layer 3 that are no numbers"),
    ],
)
def test_a_block_that_was_computed_upon_others_may_be_off_because_one_of_those_is_wrong(
    position: int, deviation: float, sentence: str
) -> None:
    assert Finding(position, Excess(layer=3, deviation=deviation, times=12.5)).sentence() == sentence
