"""What clients say of their namespaces: read strictly, kept within a bound."""

from __future__ import annotations

import json

import pytest

from kvtier.blocks.namespace import Namespace
from kvtier.blocks.namespace_document import read_fields
from kvtier.cacheserver.namespace_descriptions import NamespaceDescriptions
from kvtier.errors import TierRefused


def space(number: int) -> Namespace:
    return Namespace(bytes([number]) * 32)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def test_the_first_word_on_a_namespace_stands() -> None:
    known = NamespaceDescriptions()
    known.keep(space(1), '{"salt":"a"}')
    known.keep(space(1), '{"salt":"b"}')

    assert (known.get(space(1)), known.get(space(2))) == ('{"salt":"a"}', None)


def test_the_bound_holds_and_what_was_named_longest_ago_goes_first() -> None:
    known = NamespaceDescriptions(max_chars=20)
    for number in (1, 2, 1, 3):
        known.keep(space(number), '{"a":"b"}')

    assert [known.get(space(number)) for number in (1, 2, 3)] == ['{"a":"b"}', None, '{"a":"b"}']


def test_no_tenant_takes_the_room_of_another_or_of_the_owner() -> None:
    known = NamespaceDescriptions(max_chars=20, max_tenant_chars=10)
    known.keep(space(1), '{"a":"1"}')
    known.keep(space(2), '{"a":"2"}', "bob")
    for number in range(10, 20):
        known.keep(space(number), '{"a":"b"}', "alice")
    known.keep(space(2), '{"a":"forged"}', "alice")

    assert [known.get(space(number)) for number in (1, 2)] == ['{"a":"1"}', '{"a":"2"}']
    assert [known.get(space(number)) for number in (18, 19)] == [None, '{"a":"b"}']
    known.forget_unless({space(1)}.__contains__, 100)
    known.keep(space(3), '{"a":"c"}', "alice")
    assert [known.get(space(number)) for number in (1, 2, 3, 19)] == ['{"a":"1"}', None, '{"a":"c"}', None]


def test_namespaces_that_are_gone_are_forgotten_and_make_room() -> None:
    known = NamespaceDescriptions(max_chars=9)
    known.keep(space(1), '{"a":"b"}')
    known.forget_unless({space(2)}.__contains__, 100)
    known.keep(space(2), '{"a":"c"}')

    assert (known.get(space(1)), known.get(space(2))) == (None, '{"a":"c"}')


def test_a_few_are_looked_at_a_time_and_all_in_turn() -> None:
    known = NamespaceDescriptions()
    for number in range(10):
        known.keep(space(number), "{}")
    checked: list[Namespace] = []

    def is_known(namespace: Namespace) -> bool:
        checked.append(namespace)
        return False

    for num_calls in (1, 2, 3):
        known.forget_unless(is_known, 4)
        assert len(checked) == min(10, 4 * num_calls)
    assert [known.get(space(number)) for number in range(10)] == [None] * 10


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("not JSON", "JSON object"),
        ("[]", "JSON object"),
        ("1", "JSON object"),
        ('{"a":NaN}', "JSON object"),
        ('{"a":"é"}', "ASCII"),
        (nested(17), "more than 16 deep"),
        (nested(10_000), "JSON object|16 deep"),
        ('{"a":' + "[" * 60_000, "JSON object"),
    ],
    ids=lambda text: text[:12],
)
def test_what_is_no_plain_object_is_refused(text: str, why: str) -> None:
    with pytest.raises(TierRefused, match=why):
        read_fields(text)


def test_a_few_levels_are_read() -> None:
    assert read_fields(nested(15)) == json.loads(nested(15))
