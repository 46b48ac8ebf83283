"""Which rule is in force: LRU, or one of those that are simulated beside it."""

from __future__ import annotations

import pytest

from kvtier.blocks.ages import Rule
from kvtier.blocks.candidates import Candidates
from kvtier.blocks.duel import Duel
from kvtier.blocks.reuse_model import ReuseModel
from kvtier.blocks.run import Run

CAPACITY = 1000


class Traffic:
    """A duel, and prompts of ten blocks of which each side is told to have had some."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.cached: Candidates[object] = Candidates(ReuseModel())
        self.duel = Duel(self.cached, lambda: self.now_s, declines=True)

    def run(self, count: int = 10) -> Run[object]:
        """A run that was just used, and that all have."""
        run: Run[object] = Run()
        self.now_s += 1.0
        run.used_at = self.now_s
        self.duel.use([(run, count)], CAPACITY)
        return run

    def kept_by(self, rule: Rule, count: int = 10) -> None:
        """A prompt that only the shadow of `rule` kept."""
        run = self.run(count)
        for each, other in self.duel._others.items():
            if each is not rule:
                other.shadow.take(run, count)
        self.duel.missed(run, count)
        self.run(0)

    def kept_by_the_cache_only(self) -> None:
        """A prompt that is no run of any shadow."""
        self.duel.hit(Run(), 10)
        self.run(0)

    def kept_by_all(self) -> None:
        self.duel.hit(self.run(), 10)
        self.run(0)

    def missed_by_all(self) -> None:
        self.duel.missed(None, 10)
        self.run(0)

    def until(self, rule: Rule) -> int:
        """How many prompts that only the shadow of `rule` kept it takes until it is in force."""
        for count in range(1000):
            if self.duel.rule is rule:
                return count
            self.kept_by(rule)
        raise AssertionError("the shadow was ahead all the time and does not rule")


@pytest.mark.parametrize("rule", [Rule.AGE_PER_USE, Rule.WORTH])
def test_lru_rules_until_another_rule_would_have_had_more_hits(rule: Rule) -> None:
    traffic = Traffic()
    for _ in range(500):
        traffic.missed_by_all()
        traffic.kept_by_all()
        assert traffic.duel.rule is Rule.LRU

    assert 0 < traffic.until(rule) < 20


def test_worth_must_be_surer_than_age_per_use() -> None:
    assert Traffic().until(Rule.AGE_PER_USE) < Traffic().until(Rule.WORTH)


def test_prompts_that_now_one_side_has_and_now_the_other_do_not_make_worth_rule() -> None:
    traffic = Traffic()
    for turn in range(1000):
        if turn % 2:
            traffic.kept_by(Rule.WORTH)
        else:
            traffic.kept_by_the_cache_only()
        assert traffic.duel.rule is Rule.LRU


@pytest.mark.parametrize("rule", [Rule.AGE_PER_USE, Rule.WORTH])
def test_none_takes_over_for_one_prompt(rule: Rule) -> None:
    traffic = Traffic()
    traffic.kept_by(rule, 500)

    assert traffic.duel.rule is Rule.LRU

    traffic = Traffic()
    traffic.until(rule)
    for _ in range(500):
        traffic.kept_by_all()
    traffic.kept_by(Rule.LRU, 500)

    assert traffic.duel.rule is rule


def test_after_one_prompt_of_many_blocks_a_few_small_ones_decide() -> None:
    traffic = Traffic()
    traffic.kept_by(Rule.WORTH, 500)

    assert 0 < traffic.until(Rule.WORTH) < 20


@pytest.mark.parametrize("before", [Rule.AGE_PER_USE, Rule.WORTH])
@pytest.mark.parametrize("after", list(Rule))
def test_any_rule_takes_over_once_it_had_more_hits(before: Rule, after: Rule) -> None:
    traffic = Traffic()
    traffic.until(before)

    assert traffic.until(after) < 40
    assert traffic.duel.rule is after


@pytest.mark.parametrize("rule", [Rule.AGE_PER_USE, Rule.WORTH])
def test_a_rule_stays_in_force_while_it_has_as_many_hits(rule: Rule) -> None:
    traffic = Traffic()
    traffic.until(rule)
    for _ in range(1000):
        traffic.kept_by_all()
        traffic.missed_by_all()

    assert traffic.duel.rule is rule


def test_what_led_lru_by_less_than_its_successor_has_to_make_up_for_that() -> None:
    traffic = Traffic()
    traffic.kept_by(Rule.WORTH)
    lead = traffic.duel._others[Rule.WORTH].lead
    traffic.until(Rule.AGE_PER_USE)

    assert lead == 10
    assert traffic.duel._others[Rule.WORTH].lead <= 0


def test_a_deficit_of_the_past_does_not_keep_a_rule_from_a_try() -> None:
    traffic = Traffic()
    for _ in range(200):
        traffic.kept_by_the_cache_only()

    assert 0 < traffic.until(Rule.WORTH) < 40


def test_hits_behind_blocks_that_the_shadow_lacks_do_not_count() -> None:
    traffic = Traffic()
    for _ in range(100):
        behind = traffic.run()
        traffic.duel.hit(Run(), 1)  # only the cache has the first block
        traffic.duel.missed(behind, 10)
        traffic.run(0)

    assert traffic.duel.rule is Rule.LRU


def test_blocks_that_move_to_another_run_are_no_hits() -> None:
    traffic = Traffic()
    traffic.until(Rule.WORTH)
    for _ in range(1000):
        old = traffic.run()
        traffic.duel.moved(old, 10)
        new: Run[object] = Run()
        new.used_at = traffic.now_s
        traffic.duel.use([(new, 10)], CAPACITY)

    assert traffic.duel.rule is Rule.WORTH


@pytest.mark.parametrize("rule", [Rule.AGE_PER_USE, Rule.WORTH])
def test_what_is_cached_is_kept_in_the_shadow_of_the_rule_that_is_replaced(rule: Rule) -> None:
    traffic = Traffic()
    traffic.until(rule)
    cached = Run[object]()
    cached.used_at, cached.num_live = traffic.now_s, 400
    traffic.cached.add(cached)
    traffic.until(Rule.LRU)

    assert traffic.duel._others[rule].shadow.size_of(cached) == 400
