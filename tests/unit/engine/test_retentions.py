"""What an engine asks of its tiers for prompts that are to stay cached, and what it says of that."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from kvtier.blocks.hashing import BlockHash, block_hashes, salted_root
from kvtier.blocks.retention import Granted
from kvtier.engine.retentions import NO_TIERS, EngineRetentions
from kvtier.errors import TierUnavailable
from kvtier.testing.faults import WrappedTier
from kvtier.tiers.explanation import Explanation, MatchEnd
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.host import HostTier
from kvtier.tiers.retention import RetentionAsk, RetentionOutcome
from tests.support.actors import LAYOUT, NAMESPACE, payloads
from tests.support.waiting import LIMIT_S

BLOCK_TOKENS = LAYOUT.block_tokens
PROMPT = list(range(4 * BLOCK_TOKENS + 1))
HOUR = RetentionAsk(ttl_s=3600.0, priority=60)


@pytest.fixture
def host() -> Iterator[HostTier]:
    tier = HostTier(LAYOUT, 32 * LAYOUT.slot_bytes)
    yield tier
    tier.close()


def outcomes_of(
    retentions: EngineRetentions, *asks: tuple[RetentionAsk, int], salt: str = ""
) -> list[RetentionOutcome]:
    told: list[RetentionOutcome] = []
    is_told = threading.Event()

    def tell(outcomes: list[RetentionOutcome]) -> None:
        told.extend(outcomes)
        is_told.set()

    retentions.ask("request-1", PROMPT, salt, asks, tell)
    assert is_told.wait(LIMIT_S)
    return told


def over(*tiers: HostTier | WrappedTier) -> EngineRetentions:
    return EngineRetentions(Hierarchy(tiers), NAMESPACE, BLOCK_TOKENS)


def test_a_prompt_is_kept_in_the_tier_that_can(host: HostTier) -> None:
    retentions = over(host)

    [outcome] = outcomes_of(retentions, (HOUR, len(PROMPT)), salt="tenant")
    hashes = block_hashes(salted_root(NAMESPACE, "tenant"), PROMPT, BLOCK_TOKENS)
    host.offer(hashes, payloads(hashes))
    for number in range(8):
        others = block_hashes(NAMESPACE, [number] * 16 * BLOCK_TOKENS, BLOCK_TOKENS)
        host.offer(others, payloads(others))

    assert outcome == RetentionOutcome(
        asked_tokens=4 * BLOCK_TOKENS,
        asked_ttl_s=3600.0,
        priority=60,
        granted_tokens=4 * BLOCK_TOKENS,
        granted_ttl_s=3600.0,
        tier="host",
    )
    assert host.contains(hashes) == [True] * 4
    assert retentions.noted("request-1") == [outcome]
    retentions.close()


def test_parts_of_a_prompt_are_asked_for_one_by_one(host: HostTier) -> None:
    retentions = over(host)

    short, whole = outcomes_of(
        retentions,
        (HOUR, BLOCK_TOKENS + 1),
        (RetentionAsk(ttl_s=60.0, account="a", account_bytes=LAYOUT.slot_bytes), len(PROMPT)),
    )
    retentions.close()

    assert (short.asked_tokens, short.granted_tokens) == (BLOCK_TOKENS, BLOCK_TOKENS)
    assert (whole.granted_tokens, whole.granted_ttl_s, whole.tier) == (BLOCK_TOKENS, 60.0, "host")
    assert "budget" in whole.reason


@pytest.mark.parametrize("num_tokens", [0, BLOCK_TOKENS - 1])
def test_a_prompt_without_a_full_block_has_nothing_to_keep(host: HostTier, num_tokens: int) -> None:
    retentions = over(host)
    [outcome] = outcomes_of(retentions, (HOUR, num_tokens))
    retentions.close()

    assert (outcome.asked_tokens, outcome.granted_tokens, outcome.reason) == (0, 0, "the prompt has no full block")


def test_without_tiers_nothing_is_granted_and_it_says_so() -> None:
    [outcome] = outcomes_of(EngineRetentions(), (HOUR, len(PROMPT)))

    assert (outcome.granted_tokens, outcome.reason) == (0, NO_TIERS)


def test_a_tier_that_fails_grants_nothing_and_breaks_nothing(host: HostTier) -> None:
    class Failing(WrappedTier):
        def retain(self, hashes: Sequence[BlockHash], ask: RetentionAsk) -> Granted:
            raise TierUnavailable("gone")

    retentions = over(Failing(host))
    [outcome] = outcomes_of(retentions, (HOUR, len(PROMPT)))
    retentions.close()

    assert outcome.granted_tokens == 0
    assert outcome.reason


def test_what_is_known_is_bounded_and_a_closed_one_still_answers(host: HostTier) -> None:
    retentions = over(host)
    retentions.close()
    for number in range(5000):
        retentions.ask(f"request-{number}", PROMPT, "", [(HOUR, 16)], lambda outcomes: None)

    assert retentions.noted("request-0") == []
    assert len(retentions.noted("request-4999")) == 1


def test_sentences_say_what_was_asked_and_granted() -> None:
    outcome = RetentionOutcome(
        asked_tokens=64,
        asked_ttl_s=3600.0,
        priority=50,
        granted_tokens=32,
        granted_ttl_s=600.0,
        tier="server",
        reason="why",
    )
    explanation = Explanation(
        request_id="r",
        model="m",
        namespace="",
        prompt_tokens=64,
        block_tokens=16,
        cached_tokens={},
        ended_at_tokens=0,
        reason=MatchEnd.NEVER_STORED,
        tier="server",
        retention=(outcome,),
    )

    assert Explanation.from_json(explanation.to_json()) == explanation
    assert explanation.retention_sentences() == [
        "64 tokens were to be retained for 3600 s (priority 50); 32 are, for 600 s in the server tier: why."
    ]
