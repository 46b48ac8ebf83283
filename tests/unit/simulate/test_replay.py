"""A trace through a real pool."""

from __future__ import annotations

from kvtier.blocks.policies import LruPolicy
from kvtier.simulate.replay import replay
from kvtier.simulate.trace import TracedRequest


def test_hits_are_the_leading_cached_blocks_at_most_the_prompts_own_tokens() -> None:
    requests = [
        TracedRequest(0, 1000, 5, (1, 2)),
        TracedRequest(1, 1000, 5, (1, 2)),
        TracedRequest(2, 1536, 5, (1, 9, 2)),
    ]

    replayed = replay(requests, 10, lambda clock: LruPolicy())

    assert replayed.hit_tokens == 1000 + 512
    assert replayed.input_tokens == 3536
    assert replayed.hit_rate == 1512 / 3536
    assert (replayed.num_stored_blocks, replayed.num_evicted_blocks) == (3, 0)


def test_what_does_not_fit_is_evicted_and_a_trace_without_tokens_has_no_hits() -> None:
    requests = [TracedRequest(turn, 512, 5, (turn,)) for turn in range(5)]

    assert replay(requests, 2, lambda clock: LruPolicy()).num_evicted_blocks == 3
    assert replay([], 2, lambda clock: LruPolicy()).hit_rate == 0.0


def test_the_policys_clock_is_the_traces() -> None:
    seen: list[float] = []

    def make(clock):  # type: ignore[no-untyped-def]
        class Timed(LruPolicy):  # type: ignore[type-arg]
            def add_all(self, blocks):  # type: ignore[no-untyped-def]
                seen.append(clock())
                super().add_all(blocks)

        return Timed()

    replay([TracedRequest(1.5, 512, 1, (1,)), TracedRequest(4.0, 512, 1, (2,))], 4, make)

    assert seen == [1.5, 4.0]
