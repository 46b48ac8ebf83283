"""Prompts that begin alike are known by their beginnings."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from kvtier.api.limits import MAX_PREFIX_KEYS
from kvtier.api.vllm.bodies import read_fields
from kvtier.api.vllm.prefix_keys import num_keys_within, prefix_keys
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


@pytest.mark.parametrize("in_block", [True, False])
def test_a_line_that_is_not_in_the_prompt_makes_no_difference(in_block: bool) -> None:
    found = []
    for checksum in ("eb6c6", "fa690"):
        text = f"x-anthropic-billing-header: cc_version=2; cch={checksum};\nYou code."
        system = [{"type": "text", "text": text}] if in_block else text
        found.append(_keys(chat("hello", system=system)))

    assert found[0] == found[1]
    assert _in_common(found[0], _keys(chat("hello", system="You draw."))) == 0


def test_a_prompt_has_few_keys_however_long_it_is() -> None:
    assert len(_keys(chat("x" * 8_000_000))) == MAX_PREFIX_KEYS
    assert len(_keys(chat("end", *("turn" for _ in range(4000))))) == MAX_PREFIX_KEYS
    assert _keys({"model": "m"}) == []


def test_a_share_of_a_prompt_is_about_the_same_share_of_its_keys() -> None:
    fine, coarse = _keys({"prompt": "x" * 8000}), _keys({"prompt": "x" * 80_000})

    assert num_keys_within(len(fine), 0.5) == len(fine) // 2
    assert num_keys_within(len(coarse), 0.5) == 64 + 6  # 16 KiB in small steps, and 24 KiB in large ones
    assert [num_keys_within(len(keys), 1.0) for keys in (fine, coarse)] == [len(fine), len(coarse)]
    assert [num_keys_within(len(keys), 0.0) for keys in (fine, coarse)] == [0, 0]


def test_a_record_finds_the_longest_beginning_that_an_engine_has_seen() -> None:
    record = SeenPrefixes()
    record.note([1, 2, 3])

    assert [record.match(keys) for keys in ([1, 2, 3, 4], [1, 2, 9], [9], [])] == [3, 2, 0, 0]

    record.clear()

    assert record.match([1, 2, 3, 4]) == 0


def test_a_record_forgets_what_was_used_longest_ago() -> None:
    record = SeenPrefixes(most=4)
    for key in range(10):
        record.note([key])

    assert [record.match([key]) for key in range(10)] == [0] * 6 + [1] * 4


def test_a_beginning_that_many_prompts_share_stays() -> None:
    record = SeenPrefixes(most=4)
    for key in range(2, 10):
        record.note([1, key])

    assert [record.match([1, key]) for key in range(2, 10)] == [1] * 5 + [2] * 3


def test_a_prompt_that_comes_again_counts_once() -> None:
    record = SeenPrefixes(most=4)
    record.note([1])
    for _ in range(10):
        record.note([2, 3])
        record.note([2, 4], "id")

    assert [record.match(keys) for keys in ([1], [2, 3], [2, 4])] == [1, 2, 2]


def test_a_prompt_that_is_reported_as_gone_counts_no_longer() -> None:
    record = SeenPrefixes()
    record.note([1, 2, 3], "a")
    record.note([1, 2, 4], "b")
    record.correct("a", 0.0)

    assert record.match([1, 2, 3]) == 2  # the other prompt's

    record.correct("b", 0.0)
    record.correct("unknown", 0.0)

    assert record.match([1, 2, 4]) == 0


def test_a_prompt_that_is_reported_in_part_counts_in_part() -> None:
    record = SeenPrefixes()
    keys = list(range(8))
    record.note(keys, "a")

    found = []
    for share in (1.0, 0.5, 0.5, 0.25, 0.9):  # the last one: what is lost does not come back
        record.correct("a", share)
        found.append(record.match(keys))

    assert found == [8, 4, 4, 2, 2]


def test_what_is_reported_no_more_is_gone_and_what_never_was_is_not() -> None:
    record = SeenPrefixes()
    record.note([1], "a")
    record.note([2], "b")
    record.note([3], "c")
    record.correct("a", 1.0)
    record.correct("b", 1.0)
    record.keep_reported({"b"})

    assert [record.match([key]) for key in (1, 2, 3)] == [0, 1, 1]


def test_a_prompt_can_be_reported_by_another_id() -> None:
    record = SeenPrefixes()
    record.note([1, 2], "a")
    record.note([1, 3], "b")
    record.rename("a", "c")
    record.rename("unknown", "d")
    record.correct("a", 0.0)
    assert record.match([1, 2]) == 2

    record.correct("c", 0.0)
    record.note([1, 4], "c")
    record.rename("b", "c")  # an id that is taken: the other one is forgotten

    assert [record.match([1, key]) for key in (2, 3, 4)] == [1, 1, 2]


def test_nothing_is_left_of_prompts_that_are_gone() -> None:
    random = Random(7)
    record = SeenPrefixes(most=200)
    names: list[str] = []
    for number in range(500):
        document = [random.randrange(3) * 1000 + depth for depth in range(random.randrange(1, 12))]
        keys = [hash(tuple(document[: depth + 1])) for depth in range(len(document))]
        names.append(f"{number}")
        record.note(keys, names[-1])
        record.correct(random.choice(names), random.choice([0.0, 0.3, 0.7, 1.0]))
    for name in names:
        record.correct(name, 0.0)

    assert not record._beginnings
    assert not record._prompts
