"""Who rules: LRU, or the policy that is simulated beside it."""

from __future__ import annotations

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
        """A run that was just used, and that both have."""
        run: Run[object] = Run()
        self.now_s += 1.0
        run.used_at = self.now_s
        self.duel.use([(run, count)], CAPACITY)
        return run

    def kept_by_the_shadow_only(self) -> None:
        """A prompt that the cache evicted."""
        run = self.run()
        run.size = 0
        self.duel.missed(run, 10)
        self.run(0)

    def kept_by_the_cache_only(self) -> None:
        """A prompt that is no run of any shadow."""
        self.duel.hit(Run(), 10)
        self.run(0)

    def kept_by_both(self) -> None:
        self.duel.hit(self.run(), 10)
        self.run(0)

    def missed_by_both(self) -> None:
        self.duel.missed(None, 10)
        self.run(0)

    def until_the_other_rules(self) -> int:
        return self._until(lru_rules=False)

    def until_lru_rules(self) -> int:
        return self._until(lru_rules=True)

    def _until(self, *, lru_rules: bool) -> int:
        """How many prompts that only the shadow had it takes."""
        for count in range(1000):
            if self.duel.lru_rules is lru_rules:
                return count
            self.kept_by_the_shadow_only()
        raise AssertionError("the shadow was ahead all the time and does not rule")


def test_lru_rules_until_the_other_would_have_had_more_hits() -> None:
    traffic = Traffic()
    for _ in range(500):
        traffic.missed_by_both()
        traffic.kept_by_both()
        assert traffic.duel.lru_rules

    assert 0 < traffic.until_the_other_rules() < 20


def test_prompts_that_now_one_side_has_and_now_the_other_decide_nothing() -> None:
    traffic = Traffic()
    for turn in range(1000):
        (traffic.kept_by_the_shadow_only, traffic.kept_by_the_cache_only)[turn % 2]()
        assert traffic.duel.lru_rules


def test_neither_takes_over_for_one_prompt() -> None:
    traffic = Traffic()
    run = traffic.run(500)
    traffic.duel.missed(run, 500)
    traffic.run(0)

    assert traffic.duel.lru_rules

    traffic = Traffic()
    traffic.until_the_other_rules()
    for _ in range(500):
        traffic.kept_by_both()
    run = traffic.run(500)
    traffic.duel.missed(run, 500)
    traffic.run(0)

    assert not traffic.duel.lru_rules


def test_after_one_prompt_of_many_blocks_a_few_small_ones_decide() -> None:
    traffic = Traffic()
    run = traffic.run(500)
    traffic.duel.missed(run, 500)
    traffic.run(0)

    assert 0 < traffic.until_the_other_rules() < 20


def test_lru_takes_over_again_once_it_had_more_hits() -> None:
    traffic = Traffic()
    traffic.until_the_other_rules()

    assert 0 < traffic.until_lru_rules() < 20


def test_the_other_keeps_ruling_while_it_has_as_many_hits() -> None:
    traffic = Traffic()
    traffic.until_the_other_rules()
    for _ in range(1000):
        traffic.kept_by_both()
        traffic.missed_by_both()

    assert not traffic.duel.lru_rules


def test_a_deficit_of_the_past_does_not_keep_the_other_from_a_try() -> None:
    traffic = Traffic()
    for _ in range(200):
        traffic.kept_by_the_cache_only()

    assert 0 < traffic.until_the_other_rules() < 40


def test_hits_behind_blocks_that_the_shadow_lacks_do_not_count() -> None:
    traffic = Traffic()
    for _ in range(100):
        behind = traffic.run()
        traffic.duel.hit(Run(), 1)  # only the cache has the first block
        traffic.duel.missed(behind, 10)
        traffic.run(0)

    assert traffic.duel.lru_rules


def test_blocks_that_move_to_another_run_are_no_hits() -> None:
    traffic = Traffic()
    traffic.until_the_other_rules()
    for _ in range(1000):
        old = traffic.run()
        traffic.duel.moved(old, 10)
        new: Run[object] = Run()
        new.used_at = traffic.now_s
        traffic.duel.use([(new, 10)], CAPACITY)

    assert not traffic.duel.lru_rules


def test_the_policy_that_ruled_keeps_what_is_cached_as_its_shadow() -> None:
    traffic = Traffic()
    traffic.until_the_other_rules()
    cached = Run[object]()
    cached.used_at, cached.num_live = traffic.now_s, 400
    traffic.cached.add(cached)
    traffic.until_lru_rules()
    for _ in range(10):
        traffic.duel.missed(cached, 40)  # the cache, which is LRU's now, evicted it
        traffic.run(0)

    assert not traffic.duel.lru_rules
