"""The text in a call of a custom tool, cut anywhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.api.chat.input_text import InputText, input_text


def _pieces(arguments: str, cut: int) -> str:
    text = InputText()
    found = [text.push(arguments[at : at + cut]) for at in range(0, len(arguments), cut)]
    return "".join([*found, text.finish()])


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 8), st.booleans())
def test_any_text_comes_out_as_it_went_in(text: str, cut: int, ascii_only: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert _pieces(arguments, cut) == text


@given(st.text(st.sampled_from('{}":\\u12dD8cinputab ,')), st.integers(1, 8))
def test_cuts_make_no_difference_whatever_the_model_wrote(arguments: str, cut: int) -> None:
    assert _pieces(arguments, cut) == input_text(arguments)
    assert _pieces('{"input": "' + arguments, cut) == input_text('{"input": "' + arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        (' {\n"input" : "a", "more": 1}', "a"),
        ('{"input": "cut of', "cut of"),
        ('{"input": "\\ud83d\\ude00\\ud83d!"}', "\N{GRINNING FACE}\N{REPLACEMENT CHARACTER}!"),
        ('{"input": "\\ude00\\ud83d"}', "\N{REPLACEMENT CHARACTER}" * 2),
        ('{"input": "C:\\x"}', "C:\\x"),
        ('{"input": "\\uzzzz"}', "\\uzzzz"),
        ('{"patch": "a"}', "a"),
        ('{"more": 1, "input": "a"}', "a"),
        ('{"patch": "a", "more": "b"}', '{"patch": "a", "more": "b"}'),
        ('{"input": 3}', '{"input": 3}'),
        ('"a"', "a"),
        ("ls -l", "ls -l"),
        ("{}", ""),
        ("", ""),
    ],
)
def test_arguments_of_another_form_lose_nothing(arguments: str, text: str) -> None:
    assert input_text(arguments) == text


def test_the_text_comes_before_the_arguments_are_complete() -> None:
    text = InputText()
    assert text.push('{"inp') == ""
    assert text.push('ut": "ab') == "ab"
    assert text.push("c") == "c"


def test_a_long_head_is_looked_at_only_once() -> None:
    text = InputText()
    assert text.push(" " * 1000) == ""
    assert [text.push('{"input": "a"}'), text.finish()] == ["", "a"]
