"""Stored responses stay within their bounds, and a conversation is stored whole or not at all."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvtier.api.response_store import ResponseStore, StoredResponse, TenantResponses

_AGE_S = 100.0


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _store(clock: _Clock | None = None, *, max_responses: int = 10, max_bytes: int = 1 << 20) -> TenantResponses:
    clock = clock or _Clock()
    store = ResponseStore(max_responses=max_responses, max_bytes=max_bytes, max_age_s=_AGE_S, clock=clock)
    return store.of("ann")


def _response(name: str, previous: StoredResponse | None = None, num_bytes: int = 10) -> StoredResponse:
    return StoredResponse(name, b"x" * num_bytes, [b"item"], [f"{name}?".encode(), f"{name}!".encode()], {}, previous)


def test_a_conversation_is_its_turns_in_their_order() -> None:
    store = _store()
    first = _response("a")
    second = _response("b", first)
    for one in (first, second):
        store.add(one)

    assert second.history() == [b"a?", b"a!", b"b?", b"b!"]
    found = store.find("b")
    assert found is second


def test_tenants_find_their_own_only() -> None:
    store = ResponseStore(2)
    store.of("ann").add(_response("a"))

    assert store.of("ann").find("a") is not None
    assert store.of("bob").find("a") is None
    assert not store.of("bob").delete("a")


def test_each_tenant_has_an_equal_share() -> None:
    store = ResponseStore(2, max_responses=8, max_bytes=1 << 20)
    for number in range(6):
        store.of("ann").add(_response(f"a{number}"))
    store.of("bob").add(_response("b"))

    assert len(store.of("ann")) == 4
    assert store.of("bob").find("b") is not None


def test_what_was_not_used_for_longest_goes_first() -> None:
    store = _store(max_responses=3)
    for name in "abc":
        store.add(_response(name))
    store.find("a")
    store.add(_response("d"))

    assert [name for name in "abcd" if store.find(name)] == ["a", "c", "d"]


def test_what_is_too_large_alone_is_not_kept_and_costs_nothing_else() -> None:
    store = _store(max_bytes=10_000)
    store.add(_response("a"))
    store.add(_response("b", num_bytes=20_000))

    assert store.find("b") is None
    assert store.find("a") is not None


def test_what_is_not_used_for_long_is_forgotten() -> None:
    clock = _Clock()
    store = _store(clock)
    first = _response("a")
    store.add(first)
    store.add(_response("old"))
    clock.now = 0.9 * _AGE_S
    store.add(_response("b", first))
    clock.now = 1.5 * _AGE_S

    assert store.find("old") is None
    assert store.find("b") is not None
    assert store.find("a") is not None
    clock.now = 3 * _AGE_S
    assert store.find("a") is None
    assert store.num_bytes == 0


def test_a_conversation_outlives_the_response_that_was_deleted_from_it() -> None:
    store = _store()
    first = _response("a")
    second = _response("b", first)
    store.add(first)
    store.add(second)

    assert store.delete("a")
    assert not store.delete("a")
    assert store.find("a") is None
    assert second.history() == [b"a?", b"a!", b"b?", b"b!"]
    assert store.delete("b")
    assert (len(store), store.num_bytes) == (0, 0)


def test_an_answer_to_what_went_meanwhile_is_not_kept() -> None:
    store = _store()
    first = _response("a")
    store.add(first)
    store.delete("a")
    store.add(_response("b", first))

    assert store.find("b") is None
    assert store.num_bytes == 0


class _Conversations(RuleBasedStateMachine):
    """Any order of turns, deletions and time: bounds hold, and what is found has all of its history."""

    responses = Bundle("responses")

    def __init__(self) -> None:
        super().__init__()
        self.clock = _Clock()
        self.store = _store(self.clock, max_responses=6, max_bytes=9_000)
        self.number = 0

    @rule(target=responses, previous=st.none() | responses, num_bytes=st.integers(0, 4_000))
    def add(self, previous: StoredResponse | None, num_bytes: int) -> StoredResponse:
        self.number += 1
        response = _response(f"r{self.number}", previous, num_bytes)
        self.store.add(response)
        return response

    @rule(response=responses)
    def find(self, response: StoredResponse) -> None:
        found = self.store.find(response.response_id)
        assert found is None or found is response

    @rule(target=responses, response=consumes(responses))
    def delete(self, response: StoredResponse) -> object:
        self.store.delete(response.response_id)
        assert self.store.find(response.response_id) is None
        return multiple(response)

    @rule(passed_s=st.floats(0, _AGE_S))
    def wait(self, passed_s: float) -> None:
        self.clock.now += passed_s

    @invariant()
    def bounds_hold_and_histories_are_whole(self) -> None:
        kept = self.store.kept()
        assert len(kept) <= 6
        assert self.store.num_bytes == sum(one.num_bytes for one in kept) <= 9_000
        for response in kept:
            assert all(one in kept for one in response.chain())


_Conversations.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestConversations = _Conversations.TestCase
