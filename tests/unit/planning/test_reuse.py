from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.planning.reuse import block_tokens_of, num_distinct, uses_of
from kvtier.simulate.trace import TracedRequest
from tests.support.prompt_traffic import lru_hit_share, sessions


def traced(prompts: list[tuple[int, ...]]) -> list[TracedRequest]:
    return [TracedRequest(float(number), 16 * len(prompt), 0, prompt) for number, prompt in enumerate(prompts)]


def hit_share(prompts: list[tuple[int, ...]], num_blocks: int) -> float:
    uses = uses_of(traced(prompts))
    return sum(use.hit_blocks(num_blocks) for use in uses) / sum(use.num_blocks for use in uses)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 1000), st.integers(0, 200))
def test_one_pass_says_what_exact_lru_hits_at_any_size(
    num_sessions: int, num_turns: int, seed: int, num_blocks: int
) -> None:
    prompts = sessions(num_sessions, num_turns, seed=seed)

    assert hit_share(prompts, num_blocks) == pytest.approx(lru_hit_share(prompts, num_blocks))


def test_a_block_behind_one_that_is_new_is_no_hit() -> None:
    assert uses_of(traced([(1, 2), (9, 2)]))[1].hit_blocks(100) == 0


def test_tokens_of_a_block_follow_from_lengths() -> None:
    requests = [TracedRequest(0, 1430, 0, (1, 2, 3)), TracedRequest(0, 512, 0, (1,)), TracedRequest(0, 100, 0, ())]

    assert block_tokens_of(requests) == 512
    assert block_tokens_of([TracedRequest(0, 1030, 0, (1,)), TracedRequest(0, 5000, 0, tuple(range(9)))]) == 512
    assert block_tokens_of([TracedRequest(0, 48, 0, (1,)), TracedRequest(0, 96, 0, (1, 2))]) == 48
    assert num_distinct(requests) == 3
    with pytest.raises(ConfigError, match="no request with blocks"):
        block_tokens_of(requests[2:])
