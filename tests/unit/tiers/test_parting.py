"""An explanation tells a prompt that parted from one whose blocks are gone."""

from __future__ import annotations

import pytest

from kvtier.tiers.explanation import Explanation, MatchEnd
from kvtier.tiers.parting import Cause, How, Parting


def explanation(parting: Parting | None, *, cached: int, ended_at: int) -> Explanation:
    return Explanation(
        request_id="r",
        model="m",
        namespace="00",
        prompt_tokens=100,
        block_tokens=16,
        cached_tokens={"device": cached},
        ended_at_tokens=ended_at,
        reason=MatchEnd.EVICTED,
        tier="server",
        parting=parting,
    )


@pytest.mark.parametrize(
    ("token", "cached", "ended_at", "is_lost"),
    [(70, 64, 64, False), (70, 32, 32, True), (70, 0, 64, False), (15, 0, 0, False), (16, 0, 0, True)],
)
def test_blocks_that_are_gone_are_told_from_tokens_that_differ(
    token: int, cached: int, ended_at: int, is_lost: bool
) -> None:
    parting = Parting(how=How.PARTED, token=token, prompt_tokens=100, recorded_tokens=90)

    found = explanation(parting, cached=cached, ended_at=ended_at).parting_sentences()

    assert found[0] == f"The prompt parts from a recorded prompt at token {token}."
    assert found[1:] == [f"Some blocks of the {token} tokens in common were never stored, or are gone."] * is_lost


def test_an_explanation_without_a_parting_has_nothing_to_say_of_it() -> None:
    assert explanation(None, cached=0, ended_at=0).parting_sentences() == []


def test_nothing_recorded_is_no_loss() -> None:
    parting = Parting(how=How.NOTHING_RECORDED, token=0, prompt_tokens=100)

    assert len(explanation(parting, cached=0, ended_at=0).parting_sentences()) == 1


def test_an_explanation_is_read_back_with_its_parting() -> None:
    parting = Parting(how=How.PARTED, token=7, prompt_tokens=100, message=2, role="user", causes=[Cause.DATE])
    made = explanation(parting, cached=0, ended_at=0)

    assert Explanation.from_json(made.to_json()) == made
