"""What keeping a block is worth."""

from __future__ import annotations

from kvtier.blocks.reuse_model import NEW_CLASS, NUM_CLASSES, ReuseModel, class_of


def test_nothing_is_worth_anything_before_the_first_gap() -> None:
    model = ReuseModel()

    assert {model.worth(gap_class, age_s) for gap_class in range(NUM_CLASSES) for age_s in (0.0, 1.0, 1e9)} == {0.0}


def test_prompts_that_come_back_sooner_are_worth_more() -> None:
    model = ReuseModel()
    often, seldom = class_of(2.0), class_of(9.0)
    for _ in range(40):
        model.reused(often, 4.0)
        model.reused(seldom, 512.0)

    assert model.worth(often, 0.0) > 4 * model.worth(seldom, 0.0)


def test_a_prompt_that_is_nearly_due_is_worth_more_than_one_just_used() -> None:
    model = ReuseModel()
    gap_class = class_of(6.0)
    for _ in range(40):
        model.reused(gap_class, 70.0)

    assert model.worth(gap_class, 60.0) > model.worth(gap_class, 0.0) > model.worth(gap_class, 10_000.0)


def test_what_nobody_asks_for_again_is_worth_less() -> None:
    model, other = ReuseModel(), ReuseModel()
    for _ in range(40):
        model.reused(NEW_CLASS, 5.0)
        other.reused(NEW_CLASS, 5.0)
        other.given_up(NEW_CLASS, 500.0)

    assert other.worth(NEW_CLASS, 0.0) < model.worth(NEW_CLASS, 0.0)


def test_old_traffic_is_forgotten() -> None:
    model = ReuseModel()
    for _ in range(5_000):
        model.reused(NEW_CLASS, 5.0)
    for _ in range(60_000):
        model.given_up(NEW_CLASS, 5_000.0)

    assert model.worth(NEW_CLASS, 0.0) < 0.001


def test_every_gap_has_a_class_and_every_age_a_worth() -> None:
    model = ReuseModel()

    for log2_gap in (-1e9, -7.0, 0.0, 40.0, 1e9):
        assert NEW_CLASS < class_of(log2_gap) < NUM_CLASSES
    for age_s in (-1.0, 0.0, 1e-9, 1e18):
        model.reused(NEW_CLASS, age_s)
        assert model.worth(NEW_CLASS, age_s) >= 0.0
