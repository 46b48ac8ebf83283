"""Prompts that begin alike are known by their beginnings."""

from __future__ import annotations

import msgspec

from kvtier.api.limits import MAX_PREFIX_KEYS
from kvtier.api.vllm.bodies import read_fields
from kvtier.api.vllm.prefix_keys import prefix_keys
from kvtier.api.vllm.seen_prefixes import SeenPrefixes
from tests.support.vllm_serving import chat


def _keys(document: dict[str, object], salt: str = "") -> list[int]:
    return prefix_keys(read_fields(msgspec.json.encode(document)), salt)


def _in_common(one: list[int], other: list[int]) -> int:
    return next((number for number, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def test_the_next_turn_of_a_chat_begins_with_all_of_the_turn_before() -> None:
    first, second = _keys(chat("hello")), _keys(chat("and now?", "hello", "good morning"))

    assert first
    assert second[: len(first)] == first
    assert len(second) > len(first)


def test_long_texts_that_differ_at_the_end_have_most_keys_in_common() -> None:
    document = "word " * 4000
    first, second = _keys(chat(document + "one?")), _keys(chat(document + "two?"))

    assert 0.9 * len(first) < _in_common(first, second) < len(first)


def test_plain_prompts_and_responses_have_keys_too() -> None:
    text = "x" * 1000
    for name in ("prompt", "input"):
        first, second = _keys({"model": "m", name: text}), _keys({"model": "m", name: text + " and more"})
        assert _in_common(first, second) >= 3


def test_what_stands_before_the_messages_and_the_salt_tell_prompts_apart() -> None:
    plain = _keys(chat("hello"))

    assert _in_common(plain, _keys(chat("hello", tools=[{"type": "function"}]))) == 0
    assert _in_common(plain, _keys(chat("hello"), "salt")) == 0


def test_a_prompt_has_few_keys_however_long_it_is() -> None:
    assert len(_keys(chat("x" * 8_000_000))) == MAX_PREFIX_KEYS
    assert len(_keys(chat("end", *("turn" for _ in range(4000))))) == MAX_PREFIX_KEYS
    assert _keys({"model": "m"}) == []


def test_a_record_finds_the_longest_beginning_that_an_engine_has_seen() -> None:
    record = SeenPrefixes()
    record.note("a", [1, 2, 3])
    record.note("b", [1])

    assert [record.match(name, [1, 2, 3, 4]) for name in ("a", "b", "c")] == [3, 1, 0]

    record.forget("b")

    assert [record.match(name, [1, 2, 3, 4]) for name in ("a", "b")] == [3, 0]


def test_a_record_forgets_what_was_used_longest_ago() -> None:
    record = SeenPrefixes(most=4)
    for key in range(10):
        record.note("a", [key])

    assert [record.match("a", [key]) for key in range(10)] == [0] * 6 + [1] * 4
