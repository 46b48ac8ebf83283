"""Schemas of texts that calls have without quotes, as the library that enforces them reads their grammars."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.api.chat.schema_pattern import whole_text
from kvtier.api.chat.text_formats import TEXT_FORMATS
from kvtier.api.chat.tool import Tool
from kvtier.api.http_error import HttpError
from kvtier.engine.constraint.formats import KNOWN_FORMATS
from kvtier.engine.grammar import Grammar
from tests.support.json_formats import format_checker
from tests.unit.api.chat.test_call_grammar import (
    _IDS,
    _WITH_SPECIAL,
    _WITHOUT_SPECIAL,
    Vocabulary,
    called,
    matches,
    rules,
)

_UNQUOTED = ("qwen3_coder", "glm45")
_MARKS = ("</arg_value>", "</parameter>", "<arg_key>")
_WITH_MARKS = Vocabulary(["</s>", *_MARKS], ["</s>", *_MARKS])
_VOCABULARIES = {"special": _WITH_SPECIAL, "plain": _WITHOUT_SPECIAL, "marks": _WITH_MARKS}


def tool_of(schema: object) -> Tool:
    return Tool("f", {"type": "object", "properties": {"p": schema}, "required": ["p"]}, {}, is_strict=True)


def grammar_of(name: str, schema: object, vocabulary: Vocabulary = _WITH_SPECIAL) -> Grammar:
    special = {_WITH_SPECIAL: _IDS, _WITHOUT_SPECIAL: {}}.get(
        vocabulary, {one: vocabulary.ids[one] for one in _MARKS if one in vocabulary.ids}
    )
    found = rules(name, tools=[tool_of(schema)], must_call=True, special_tokens=special).grammar(may_think=False)
    assert found is not None
    return found


_CODE = {"type": "string", "pattern": "^[0-9]{3}$"}
CASES: list[tuple[Any, list[object], list[object]]] = [
    (_CODE, ["123"], ["", "12", "1234", "abc", "123\n"]),
    ({"type": "string", "pattern": "[0-9]{3}"}, ["123", "a 1234\nb"], ["", "12"]),
    ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb", "ab"], ["xa", "bx", ""]),
    ({"type": "string", "pattern": r"^(?:a/b|\/c)+?[\w-]$"}, ["a/b/cx", "/c-"], ["/c", "/c/"]),
    ({"type": "string", "pattern": "^[^<]+$"}, ["a"], ["<", ""]),
    ({"type": "string", "pattern": "^.*$"}, ["a < b", ""], ["a\nb"]),
    ({"type": "string", "pattern": "^a", "maxLength": 2}, ["a", "ab"], ["abc", "b"]),
    ({"type": "string", "minLength": 1}, ["a", "a\nb" * 99, "</x>"], [""]),
    ({"type": "string", "minLength": 2, "maxLength": 3.0}, ["ab", "äöü"], ["a", "abcd"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-02-30", ""]),
    ({"type": "string", "format": "password"}, ["", "x"], []),
    ({"type": "string", "enum": ["a", "b c"]}, ["a", "b c"], ["", "b"]),
    ({"type": "string", "enum": ["a", ""]}, ["a", ""], ["b"]),
    ({"enum": ["a", "b"]}, ["a"], ["c", ""]),
    ({"type": "string", "enum": ["a", "bb"], "minLength": 2}, ["bb"], ["a", "cc"]),
    ({"type": "string", "const": "x"}, ["x"], ["", "y"]),
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None], ["b", ""]),
    ({"type": ["string", "null"], "pattern": "^a$"}, ["a", None], ["b", ""]),
    ({"anyOf": [_CODE, {"type": "null"}]}, ["123", None], ["12", "x"]),
    ({"anyOf": [_CODE, {"type": "string", "const": "none"}]}, ["123", "none"], ["12", "x"]),
    ({"oneOf": [{"type": "string", "maxLength": 1}, {"type": "boolean"}]}, ["x", True], ["xx"]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["", "x", None], []),
]


@pytest.mark.parametrize("vocabulary", _VOCABULARIES)
@pytest.mark.parametrize("name", _UNQUOTED)
@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=lambda one: json.dumps(one)[:50])
def test_a_text_without_quotes_follows_its_schema(
    name: str, vocabulary: str, schema: Any, right: list[object], wrong: list[object]
) -> None:
    grammar = grammar_of(name, schema, _VOCABULARIES[vocabulary])

    for value in right:
        assert matches(grammar, called(name, ("f", {"p": value})), _VOCABULARIES[vocabulary]), value
    for value in wrong:
        assert not matches(grammar, called(name, ("f", {"p": value})), _VOCABULARIES[vocabulary]), value


@pytest.mark.parametrize(("name", "end"), [("qwen3_coder", "</parameter>"), ("glm45", "</arg_value>")])
def test_the_mark_after_a_text_is_never_part_of_it(name: str, end: str) -> None:
    for schema in ({"type": "string", "minLength": 1}, {"type": "string", "pattern": "^.*>$"}):
        grammar = grammar_of(name, schema, _WITHOUT_SPECIAL)

        assert matches(grammar, called(name, ("f", {"p": "a </b>"})), _WITHOUT_SPECIAL)
        assert not matches(grammar, called(name, ("f", {"p": f"a{end}>"})), _WITHOUT_SPECIAL)


@pytest.mark.parametrize("name", _UNQUOTED)
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        *(
            ({"type": "string", "pattern": pattern}, "its pattern")
            for pattern in (
                "(?=a)b",
                "(a)\\1",
                "\\bfoo",
                "(^a|b)",
                "a$b",
                "a)",
                "(a",
                "a\\",
                "*a",
                "a{,3}",
                "[a",
                "(?i)a",
            )
        ),
        ({"type": "string", "pattern": 5}, "its pattern"),
        ({"type": "string", "maxLength": 4097}, "its maxLength"),
        ({"type": "string", "minLength": 1025}, "its minLength"),
        ({"type": "string", "minLength": -1}, "its minLength"),
        ({"type": "string", "maxLength": True}, "its maxLength"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "its minLength"),
        ({"type": "string", "allOf": [_CODE]}, "allOf"),
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"type": ["string", "integer"], "pattern": "a"}, '"integer"'),
        ({"anyOf": [_CODE, {"type": "array"}]}, '"array"'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "pattern": "a"}, "anyOf"),
        ({"anyOf": [_CODE, {"type": "boolean", "const": True}]}, "another type"),
        ({"oneOf": [_CODE, {"type": "string", "maxLength": 2}]}, "oneOf"),
        ({"type": "string", "enum": ["a", 5]}, "its values"),
        ({"type": "string", "enum": ["a</parameter></arg_value>"]}, "a value"),
        ({"type": "string", "enum": ["a"], "const": "a"}, "const"),
    ],
    ids=lambda one: json.dumps(one)[:50],
)
def test_what_a_grammar_cannot_express_is_refused(name: str, schema: Any, reason: str) -> None:
    with pytest.raises(HttpError) as caught:
        grammar_of(name, schema)

    assert (caught.value.status, caught.value.parameter) == (400, "tools")
    assert 'a parameter "p" of "f"' in caught.value.sentence
    assert reason in caught.value.sentence


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "glm4", "llama4_pythonic"])
@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": ["array", "null"]}, {"enum": ["a"]}, {"type": 5}])
def test_parameters_that_cannot_be_an_object_are_refused(name: str, schema: dict[str, object]) -> None:
    with pytest.raises(HttpError, match='parameters of "f"') as caught:
        rules(name, tools=[Tool("f", schema, {})], must_call=True).grammar(may_think=False)

    assert (caught.value.status, caught.value.parameter) == (400, "tools")


def test_of_several_types_of_parameters_only_an_object_is_allowed() -> None:
    tool = Tool("f", {"type": ["string", "object"], "properties": {"a": {"type": "integer"}}}, {})
    grammar = rules("hermes", tools=[tool], must_call=True).grammar(may_think=False)

    assert matches(grammar, called("hermes", ("f", {"a": 1})))
    assert not matches(grammar, called("hermes", ("f", {"a": "x"})))
    assert not matches(grammar, called("hermes", ("f", "text")))  # type: ignore[arg-type]


# --- formats and patterns ---------------------------------------------------------------------------------------------


def test_all_enforced_formats_are_known() -> None:
    assert set(TEXT_FORMATS) == KNOWN_FORMATS


@pytest.mark.parametrize("form", TEXT_FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_text_of_a_format_is_right(form: str, data: st.DataObject) -> None:
    value = data.draw(st.from_regex(re.compile(TEXT_FORMATS[form], re.ASCII), fullmatch=True))

    if form != "hostname" or len(value) <= 253:
        format_checker().check(value, form)
    assert "<" not in value
    assert "\n" not in value


_SAMPLES = {
    "date-time": "2024-12-31T23:59:60.5+01:00",
    "time": "12:00:00Z",
    "date": "2024-04-30",
    "duration": "P1Y2M3DT4H5M6S",
    "email": "a.b+c@example.org",
    "hostname": "a-b.example",
    "ipv4": "255.0.10.199",
    "ipv6": "2001:db8::1",
    "uri": "https://u@example.org:80/a/b?c=d/%20#e",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
}


@pytest.mark.parametrize("name", _UNQUOTED)
@pytest.mark.parametrize("form", TEXT_FORMATS)
def test_the_library_reads_the_formats_alike(name: str, form: str) -> None:
    grammar = grammar_of(name, {"type": "string", "format": form})

    assert matches(grammar, called(name, ("f", {"p": _SAMPLES[form]})))
    assert not matches(grammar, called(name, ("f", {"p": "no <format>"})))
    assert not matches(grammar, called(name, ("f", {"p": ""})))


_ATOMS = st.sampled_from(
    ["a", "b", r"\d", r"\w", "[ab]", "[^a]", r"[\w-]", r"[a\-]", "(?:a|b)", "(ab)", ".", r"\.", r"[[&]"]
)
_PATTERNS = st.builds(
    lambda alternatives: "|".join(alternatives),
    st.lists(
        st.builds(
            lambda begin, parts, end: begin + "".join(parts) + end,
            st.sampled_from(["", "^"]),
            st.lists(st.builds(str.__add__, _ATOMS, st.sampled_from(["", "*", "+", "?", "{1,2}", "+?"])), max_size=3),
            st.sampled_from(["", "$"]),
        ),
        min_size=1,
        max_size=3,
    ),
)


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@settings(max_examples=150, deadline=None)
@given(pattern=_PATTERNS, text=st.text("ab0.-[&\n<", max_size=5))
def test_a_pattern_means_the_same_in_the_library(pattern: str, text: str) -> None:
    grammar = grammar_of("glm45", {"type": "string", "pattern": pattern}, _WITHOUT_SPECIAL)
    is_found = re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None

    assert matches(grammar, called("glm45", ("f", {"p": text})), _WITHOUT_SPECIAL) is is_found
    assert bool(re.fullmatch(whole_text(pattern), text)) is is_found
