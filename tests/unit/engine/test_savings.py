"""What cached tokens have saved, before and after the speed of the device is known."""

from __future__ import annotations

from kvtier.engine.savings import Savings
from kvtier.observe.metrics import EngineCounts
from kvtier.tiers.speeds import Speeds

_CHUNK = 1024


def savings(speeds: Speeds) -> tuple[Savings, EngineCounts]:
    counts = EngineCounts()

    def compute_s(num_tokens: int) -> float | None:
        return speeds.prefill_s(0, num_tokens, _CHUNK) if speeds.knows_prefill(num_tokens) else None

    return Savings(counts, compute_s), counts


def end(saved: Savings, num_cached: int) -> None:
    saved.note_end("stop", 1000, {"disk": num_cached})


def test_the_speed_of_a_step_of_a_few_tokens_values_no_long_prompt() -> None:
    """Such a step takes as long as one of hundreds of tokens: scaled up, it would claim much more than was saved."""
    speeds = Speeds()
    saved, counts = savings(speeds)
    speeds.note_prefill([(1000, 20)], 0.01)
    end(saved, 1000)

    assert (counts.saved_s, counts.unvalued_tokens) == (0.0, 1000)


def test_tokens_that_were_cached_before_the_speed_was_known_are_valued_later() -> None:
    speeds = Speeds()
    saved, counts = savings(speeds)
    for _ in range(10):
        end(saved, 1000)
    assert (counts.saved_s, counts.unvalued_tokens) == (0.0, 10_000)

    speeds.note_prefill([(0, 1000)], 0.5)
    end(saved, 0)
    assert (round(counts.saved_s, 6), counts.unvalued_tokens) == (5.0, 0)

    end(saved, 1000)
    assert round(counts.saved_s, 6) == 5.5


def test_short_prompts_are_valued_by_steps_of_their_own_size() -> None:
    speeds = Speeds()
    saved, counts = savings(speeds)
    speeds.note_prefill([(0, 48)], 0.02)
    end(saved, 48)

    assert (round(counts.saved_s, 6), counts.unvalued_tokens) == (0.02, 0)


def test_a_prompt_without_hits_saves_nothing() -> None:
    saved, counts = savings(Speeds())
    end(saved, 0)

    assert (counts.saved_s, counts.unvalued_tokens) == (0.0, 0)
