"""Calls as models write them: read back from what each family's template makes of them, however the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.answer_reader import AnswerReader, joined_parts
from kvtier.api.chat.parts import CallArguments, CallBegin, TextPart, WholeParts
from kvtier.api.chat.tool_formats import TOOL_FORMATS, format_in
from tests.support.chat_templates import TEMPLATES, answer_text
from tests.support.examples import examples

_ELEMENTS = ("qwen3_coder", "glm45")
_PYTHONIC = "llama4_pythonic"
_JSON = [name for name in TEMPLATES if name not in (*_ELEMENTS, _PYTHONIC)]
_MARKS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *("<|python_start|>", "<|python_end|>", "[f(a=", ")]"),
    *("<function=", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "f\n"),
]
_TYPES = {"a": ["string"], "b": ["integer"], "c": ["boolean"], "d": ["object"], "e": ["string", "null"], "g": []}
_CALLS: list[tuple[str, dict[str, object]]] = [
    ("f", {"a": 'x "y" \\ \n</tool_call> é 😀'}),
    ("g.h-1", {}),
    ("f", {"a": "", "d": {"e": [1, -2.5e3, True, None, {"": "}"}]}}),
]


def read_whole(form: AnswerForm, text: str, prompt_end: str = "") -> WholeParts:
    """The parts of an answer that is complete."""
    reader = AnswerReader(form, prompt_end)
    return joined_parts([*reader.push(text), *reader.finish()])


def form_of(tool_format: str, **values: object) -> AnswerForm:
    return AnswerForm(tool_format, ("f", "g.h-1"), parameter_types={"f": _TYPES}, **values)  # type: ignore[arg-type]


def read_cut(form: AnswerForm, pieces: Sequence[str], prompt_end: str = "") -> WholeParts:
    reader = AnswerReader(form, prompt_end)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return joined_parts([*parts, *reader.finish()])


def without_ids(parts: WholeParts) -> tuple[str, str, list[tuple[str, str]]]:
    return parts.text, parts.reasoning, [(call.name, call.arguments) for call in parts.calls]


def calls_of(parts: WholeParts) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in parts.calls]


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_known_by_its_template(name: str) -> None:
    assert format_in(TEMPLATES[name]) == name
    assert set(TEMPLATES) == set(TOOL_FORMATS)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|python_start|>[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}{% endfor %}", _PYTHONIC),
        ("{{ 'Answer as [func_name1(key=value)]' }}{% if m.tool_calls %}{{ m.content }}{% endif %}", _PYTHONIC),
        (
            '{% if m.tool_calls %}<|python_start|>{"name": {{ m.name }}, "parameters": } ipython{% endif %}',
            "llama3_json",
        ),
        ("{{ 'Answer (' + m.name + ')' }}{% if m.tool_calls %}{{ m.content }}{% endif %}", ""),
    ],
)
def test_llama_4s_templates_write_calls_in_one_way_or_another(template: str, name: str) -> None:
    assert format_in(template) == name


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_back_however_the_text_is_cut(name: str) -> None:
    calls = _CALLS if name not in _ELEMENTS else [("f", {"a": 'x "y"\nz é 😀', "b": 3, "d": {"k": [1]}}), ("g.h-1", {})]
    text = answer_text(TEMPLATES[name], calls)

    whole = read_whole(form_of(name), text)

    assert calls_of(whole) == calls
    assert (whole.text, whole.reasoning) == ("", "")
    for at in range(len(text)):
        assert without_ids(read_cut(form_of(name), [text[:at], text[at:]])) == without_ids(whole)
    assert without_ids(read_cut(form_of(name), list(text))) == without_ids(whole)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if TOOL_FORMATS[name].mark])
def test_text_before_a_call_is_text_and_the_space_between_is_nobodys(name: str) -> None:
    text = answer_text(TEMPLATES[name], [("f", {"a": "1"})], text="I look.")

    whole = read_cut(form_of(name), list(text))

    assert (whole.text, calls_of(whole)) == ("I look.", [("f", {"a": "1"})])


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(_MARKS)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,12}", fullmatch=True)
_CUTS = st.lists(st.integers(0, 400), max_size=6)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted({at for at in cuts if at < len(text)}), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


@pytest.mark.parametrize("name", _JSON)
@settings(max_examples=examples(40))
@given(
    calls=st.lists(st.tuples(_NAMES, st.dictionaries(_TEXTS, _VALUES, max_size=3)), min_size=1, max_size=3), cuts=_CUTS
)
def test_any_arguments_in_json_are_read_back(
    name: str, calls: list[tuple[str, dict[str, object]]], cuts: list[int]
) -> None:
    text = answer_text(TEMPLATES[name], calls)
    form = AnswerForm(name, tuple(call for call, _ in calls))

    assert calls_of(read_cut(form, cut(text, cuts))) == calls


@settings(max_examples=examples(80))
@given(
    calls=st.lists(st.tuples(_NAMES, st.dictionaries(_NAMES, _VALUES, max_size=3)), min_size=1, max_size=3),
    cuts=_CUTS,
    writes=st.sampled_from([json.dumps, repr]),
    leads=st.sampled_from(["", "<|python_start|>", "I look. <|python_start|>"]),
)
def test_any_values_in_pythons_syntax_are_read_back(
    calls: list[tuple[str, dict[str, object]]], cuts: list[int], writes: Callable[[object], str], leads: str
) -> None:
    written = [
        f"{name}({', '.join(f'{key}={writes(value)}' for key, value in given.items())})" for name, given in calls
    ]
    text = f"{leads}[{', '.join(written)}]"

    whole = read_cut(AnswerForm(_PYTHONIC, tuple(call for call, _ in calls)), cut(text, cuts))

    assert calls_of(whole) == calls
    assert whole.text == ("I look." if leads.startswith("I") else "")


_ELEMENT_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "a": _TEXTS.filter(lambda text: "</" not in text),
        "b": st.integers(-(10**20), 10**20),
        "c": st.booleans(),
        "d": st.dictionaries(_NAMES, st.integers(), max_size=2),
        "e": st.none() | st.just("text"),
        "g": st.lists(st.booleans() | st.integers(), max_size=3),
    },
)


@pytest.mark.parametrize("name", _ELEMENTS)
@settings(max_examples=examples(60))
@given(values=_ELEMENT_VALUES, cuts=_CUTS)
def test_any_values_of_elements_are_read_back_by_their_types(
    name: str, values: Mapping[str, object], cuts: list[int]
) -> None:
    text = answer_text(TEMPLATES[name], [("f", values)])

    assert calls_of(read_cut(form_of(name), cut(text, cuts))) == [("f", values)]


_SPREAD = {"a": "x", "g": [1.0, 0.5], "d": {"k": {}}}
_WORDS = {"a": "", "b": 7, "g": 1000.0, "c": True, "e": None}

# --- what else models write -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', [("f", {"a": "x\ny"})]),
        ("hermes", '<tool_call>{"id": [1, {}], "name": "f", "arguments": {}}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name": "unheard", "arguments": {}}</tool_call>', [("unheard", {})]),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", [("f", {"a": "1"})]),
        ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", {"a": 1})]),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=b>x</parameter></function></tool_call>",
            [("f", {"b": "x"})],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=c>True</parameter></function></tool_call>",
            [("f", {"c": True})],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=z>1</parameter></function></tool_call>",
            [("f", {"z": "1"})],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call>\n",
            [("f", {"a": "x"})],
        ),
        (
            "qwen3_coder",
            "<function=f><parameter=c>true</parameter><parameter=b>\n7\n</function>",
            [("f", {"c": True, "b": 7})],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>\nx\n</function>\n</tool_call>\ny\n</parameter></function></tool_call>",
            [("f", {"a": "x\n</function>\n</tool_call>\ny"})],
        ),
        ("glm45", "<tool_call>f\n</tool_call>", [("f", {})]),
        ("glm45", "<tool_call>f<arg_key>b</arg_key><arg_value>7</arg_value></tool_call>", [("f", {"b": 7})]),
        ("glm45", "<tool_call>f</tool_call>", [("f", {})]),
        ("glm4", 'f\n{"a": 1}<|assistant|>f\n{"a": 2}', [("f", {"a": 1}), ("f", {"a": 2})]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}\n', [("f", {})]),
        (_PYTHONIC, "[f(a='x', b=-1_000, c=True, e=None,)]", [("f", {"a": "x", "b": -1000, "c": True, "e": None})]),
        (_PYTHONIC, "[ f( a = 'x' , g = [ 1. , .5, ], d={ 'k' : { } , } ) , ]", [("f", _SPREAD)]),
        (_PYTHONIC, "<|python_start|>[f()]<|python_end|>\n<|python_start|>[f()]<|python_end|>", [("f", {}), ("f", {})]),
        (_PYTHONIC, "[f()]\n[f()]", [("f", {}), ("f", {})]),
        (_PYTHONIC, '[f(a="""say "hi""\n""")]', [("f", {"a": 'say "hi""\n'})]),
        (_PYTHONIC, r"[f(a='it\'s \x41\101\u00e9\U0001f600\ud83d\ude00\d\n')]", [("f", {"a": "it's AAé😀😀\\d\n"})]),
        (_PYTHONIC, "[f(a='', b=007, g=1E+3, c=true, e=null)]", [("f", _WORDS)]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', [("f", {"a": 1})]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', [("f", {"a": 1})]),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
    ],
)
def test_what_models_write_besides_is_a_call(name: str, text: str, expected: list[tuple[str, object]]) -> None:
    for pieces in ([text], list(text)):
        whole = read_cut(form_of(name), pieces)
        assert (whole.text, calls_of(whole)) == ("", expected)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a <tool_call> b"),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argu'),
        ("hermes", "<tool_call>" + "[" * 1000),
        ("qwen3_coder", "<tool_call> <function"),
        ("qwen3_coder", "<function=" + "x" * 300 + ">"),
        ("glm45", "<tool_call>two words\nof text</tool_call>"),
        ("glm4", "f\nis a function"),
        ("glm4", 'h\n{"a": 1}'),
        ("llama3_json", '{"name": "Ann", "age": 3}'),
        ("llama3_json", 'See: {"name": "f", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        (_PYTHONIC, "[1] says f(a=1)"),
        (_PYTHONIC, "[f](a=1)"),
        (_PYTHONIC, "[f(1)]"),
        (_PYTHONIC, "[f (a=1)]"),
        (_PYTHONIC, "[f(**{'a': 1})]"),
        (_PYTHONIC, "[f(a"),
        (_PYTHONIC, "See [f(a=1)]"),
        (_PYTHONIC, "<|python_start|>print(1)<|python_end|>"),
        (_PYTHONIC, "[" + "x" * 1000 + "(a=1)]"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral", "[TOOL_CALLS] [1]"),
    ],
)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert without_ids(read_cut(form_of(name), pieces)) == (text, "", [])


def test_arguments_come_as_they_are_written() -> None:
    reader = AnswerReader(form_of("hermes"))

    parts = [reader.push(piece) for piece in ('<tool_call>{"name": "f", ', '"arguments": {"a"', ': "b', 'c"}', "}")]

    assert parts[0] == []
    begin, first = parts[1]
    assert isinstance(begin, CallBegin)
    assert (begin.number, begin.name) == (0, "f")
    assert first == CallArguments(0, '{"a"')
    assert [*parts[2], *parts[3]] == [CallArguments(0, ': "b'), CallArguments(0, 'c"}')]
    assert [*parts[4], *reader.finish()] == []


def test_a_call_that_is_cut_keeps_what_it_has() -> None:
    whole = read_whole(form_of("hermes"), 'ok <tool_call>{"name": "f", "arguments": {"a": "b')

    assert without_ids(whole) == ("ok", "", [("f", '{"a": "b')])


def test_what_follows_wrong_arguments_is_text() -> None:
    whole = read_whole(form_of("hermes"), '<tool_call>{"name": "f", "arguments": {"a": oh}} and so on')

    assert without_ids(whole) == ("oh}} and so on", "", [("f", '{"a": ')])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("__import__('os').getpid()", ""),
        ("open('x')", ""),
        ("Paris", ""),
        ("1 + 1", "1"),
        ("nan", ""),
        ("1__0", ""),
        ("f'{x}'", ""),
        ("{1: 2}", "{"),
        ("{'a', 'b'}", '{"a"'),
        ("(1, 2)", ""),
        (r"'\U00110000'", '"'),
        (r"'\x1g'", '"'),
        ("'a' 'b'", '"a"'),
        ("[1 2]", "[1"),
        ("9" * 2000, ""),
        ("[" * 10_000, "[" * 128),
        ("{'a':" * 10_000, '{"a": ' * 128),
    ],
)
def test_nothing_in_pythons_syntax_is_evaluated_and_what_is_no_value_is_text(value: str, shown: str) -> None:
    whole = read_cut(form_of(_PYTHONIC), list(f"[f(a={value})]"))

    [call] = whole.calls
    assert call.arguments == '{"a": ' + shown
    assert whole.text.endswith(")]")


def test_half_a_surrogate_stays_an_escape() -> None:
    [call] = read_whole(form_of(_PYTHONIC), r"[f(a='\ud800')]").calls

    assert call.arguments == '{"a": "\\ud800"}'


def test_long_text_in_pythons_syntax_is_read_in_linear_time() -> None:
    """Every character in a piece of its own; quadratic work would take minutes."""
    text = "[f(a='" + "x\\n" * 100_000 + "', g=[" + "1, " * 100_000 + "])]"

    [call] = read_cut(form_of(_PYTHONIC), list(text)).calls

    assert len(json.loads(call.arguments)["g"]) == 100_000


def test_one_call_is_all_where_several_are_not_allowed() -> None:
    text = answer_text(TEMPLATES["hermes"], [("f", {"a": 1}), ("g", {})])

    assert calls_of(read_whole(form_of("hermes", allows_several=False), text)) == [("f", {"a": 1})]


@pytest.mark.parametrize(("name", "length"), [("hermes", 29), ("mistral", 9), ("mistral_args", 9)])
def test_ids_are_as_long_as_templates_want_them(name: str, length: int) -> None:
    text = answer_text(TEMPLATES[name], [("f", {}), ("f", {})])

    ids = [call.call_id for call in read_whole(form_of(name), text).calls]

    assert [len(one) for one in ids] == [length, length]
    assert ids[0] != ids[1]


@pytest.mark.parametrize("name", TEMPLATES)
def test_spaces_behind_a_mark_that_begins_no_call_are_kept(name: str) -> None:
    text = '<tool_call> {"name": "f"'

    assert without_ids(read_whole(form_of(name), text)) == (text, "", [])


# --- anything at all --------------------------------------------------------------------------------------------------

_SCRAPS = st.sampled_from(
    [*_MARKS, "{", "}", "[", "]", '"', ":", ",", ";", "name", "arguments", "parameters", '{"name": "f"']
)
_GARBAGE = st.lists(
    _SCRAPS | st.sampled_from([" ", "\n", "\\", "\\u12", "1e", "-", "true", "x", ">", "é"]), max_size=25
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(80))
@given(scraps=_GARBAGE, thinks=st.booleans())
def test_garbage_is_read_without_loss_and_however_it_is_cut(name: str, scraps: list[str], thinks: bool) -> None:
    text = "".join(scraps)
    form = form_of(name, splits_reasoning=thinks)

    whole = read_whole(form, text)

    assert without_ids(read_cut(form, scraps)) == without_ids(whole)
    assert without_ids(read_cut(form, list(text))) == without_ids(whole)
    if not whole.calls and not thinks:
        assert whole.text == text


# --- thoughts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_end", "text", "expected"),
    [
        ("", "<think>\nhm\n\nso\n</think>\n\nyes ", ("yes ", "hm\n\nso")),
        ("<|assistant|>\n<think>\n", "hm</think>yes", ("yes", "hm")),
        ("<think>\n\n</think>\n\n", "yes", ("yes", "")),
        ("", "yes <think>no</think>", ("yes <think>no</think>", "")),
        ("", "<think>hm", ("", "hm")),
        ("", " <thin", (" <thin", "")),
        ("", "<think>\n\n</think>\n\n  yes", ("yes", "")),
    ],
)
def test_a_thought_is_no_text(prompt_end: str, text: str, expected: tuple[str, str]) -> None:
    for form in (AnswerForm(splits_reasoning=True), form_of("hermes", splits_reasoning=True)):
        for pieces in ([text], list(text)):
            whole = read_cut(form, pieces, prompt_end)
            assert (whole.text, whole.reasoning) == expected


def test_a_call_after_a_thought_is_a_call_and_one_inside_is_not() -> None:
    call = answer_text(TEMPLATES["hermes"], [("f", {})])

    whole = read_whole(form_of("hermes", splits_reasoning=True), f"<think>{call}</think>\n{call}")

    assert without_ids(whole) == ("", call, [("f", "{}")])


def test_a_thought_that_nobody_wants_is_left_out() -> None:
    form = AnswerForm(splits_reasoning=True, shows_reasoning=False)

    assert without_ids(read_whole(form, "<think>hm</think>yes")) == ("yes", "", [])


def test_without_a_form_everything_is_text_at_once() -> None:
    reader = AnswerReader(AnswerForm())

    assert reader.push("<think> <tool_call>") == [TextPart("<think> <tool_call>")]
    assert reader.finish() == []
