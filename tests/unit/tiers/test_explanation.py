"""One request's match as a value: what is written is what is read, and every reason is a sentence."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.tiers.explanation import Explanation, MatchEnd

counts = st.integers(0, 1 << 30)
explanations = st.builds(
    Explanation,
    request_id=st.text(),
    model=st.text(),
    namespace=st.text(),
    prompt_tokens=st.just(1 << 30),
    block_tokens=st.integers(1, 4096),
    cached_tokens=st.dictionaries(st.text(), counts, max_size=4),
    ended_at_tokens=counts,
    reason=st.sampled_from(MatchEnd),
    tier=st.text(),
    detail=st.text(),
    first_tokens=st.lists(counts, max_size=4).map(tuple),
)


def made(**changes: object) -> Explanation:
    fields: dict[str, object] = {
        "request_id": "r1",
        "model": "qwen",
        "namespace": "ab" * 32,
        "prompt_tokens": 100,
        "block_tokens": 16,
        "cached_tokens": {"device": 16, "host": 0, "server": 32},
        "ended_at_tokens": 48,
        "reason": MatchEnd.EVICTED,
        "tier": "server",
    }
    return Explanation(**(fields | changes))  # type: ignore[arg-type]


@given(explanations)
def test_what_is_written_is_what_is_read(explanation: Explanation) -> None:
    assert Explanation.from_json(explanation.to_json()) == explanation


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "{}",
        "[]",
        "not JSON",
        "\ud800",
        "[" * 100_000,
        b"\xff",
        made().to_json().replace("evicted", "whatever"),
        made().to_json().replace('"prompt_tokens":100', '"prompt_tokens":"100"'),
        made().to_json().replace('"prompt_tokens":100', '"prompt_tokens":47'),
        made().to_json().replace('"block_tokens":16', '"block_tokens":0'),
        made().to_json().replace('"host":0', '"host":-1'),
        made().to_json().replace('"tier"', '"more":1,"tier"'),
        made().to_json() + " 1",
    ],
    ids=itertools.count(),
)
def test_anything_else_is_refused(text: str | bytes) -> None:
    with pytest.raises(ConfigError, match="this is not an explanation"):
        Explanation.from_json(text)


def test_a_match_cannot_end_behind_the_prompt() -> None:
    with pytest.raises(ConfigError, match="cannot end at token 101"):
        made(ended_at_tokens=101)


def test_a_sentence_says_how_much_from_where_and_why_not_more() -> None:
    assert made().sentence() == (
        "48 of 100 prompt tokens were cached (16 from device, 32 from server); the match ended at token 48 in "
        "the server tier because the next block was stored once and has been evicted."
    )


@pytest.mark.parametrize("reason", MatchEnd)
def test_every_reason_makes_one_sentence(reason: MatchEnd) -> None:
    sentence = made(reason=reason, cached_tokens={}, detail="more of it", tier="").sentence()

    assert sentence.count(".") == 1
    assert sentence.endswith("(more of it).")
