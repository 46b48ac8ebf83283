"""Grammars of answers with calls, as the library that enforces them reads them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvtier.api.chat.call_grammar import AnswerRules
from kvtier.api.chat.custom_tool import read_custom_tool
from kvtier.api.chat.tool import Tool
from kvtier.api.chat.tool_formats import TOOL_FORMATS
from kvtier.api.json_body import JsonBody
from kvtier.engine.grammar import JSON_OBJECT, Grammar
from tests.support.chat_templates import TEMPLATES, answer_text

_END = "</s>"
_SPECIAL = (
    *(_END, "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<think>", "</think>"),
)
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/whole"}, "c": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"whole": {"type": "integer"}},
}
_RIGHT = {"a": 'two "words"', "b": 3, "c": "y"}


class Vocabulary:
    """A token for every byte, and one for each of `words`, of which those in `special` are special. llguidance's names.

    In a text, words are always read as their tokens.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, words: Sequence[str], special: Collection[str]) -> None:
        self.ids = {word: 256 + number for number, word in enumerate(words)}
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in words)]
        self.special_token_ids = [self.ids[word] for word in special]
        self.eos_token_id = self.ids[_END]
        self.made = LLTokenizer(self)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())

    def encode(self, text: str) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, self.ids)) + ")", text)
        return [one for part in parts for one in ([self.ids[part]] if part in self.ids else part.encode())]


_WITH_SPECIAL = Vocabulary(_SPECIAL, _SPECIAL)
_WITHOUT_SPECIAL = Vocabulary([_END], [_END])
_WITH_WORDS = Vocabulary([*_SPECIAL, "<tool_call>", "</tool_call>"], [_END])
"""Like Qwen's: marks are tokens, but not special ones."""

_IDS = {word: _WITH_SPECIAL.ids[word] for word in _SPECIAL}


def strict(name: str) -> Tool:
    return Tool(name, _SCHEMA, {}, is_strict=True)


def rules(name: str | None, **values: object) -> AnswerRules:
    defaults = {
        "tools": [strict("f"), strict("g")],
        "must_call": False,
        "allows_several": True,
        "output": None,
        "special_tokens": _IDS,
    }
    tool_format = None if name is None else TOOL_FORMATS[name]
    return AnswerRules(tool_format, **{**defaults, **values})  # type: ignore[arg-type]


def matches(grammar: Grammar | None, text: str, vocabulary: Vocabulary = _WITH_SPECIAL) -> bool:
    """Whether it allows exactly this text."""
    assert grammar is not None
    written = {"lark": LLMatcher.grammar_from_lark, "json_schema": LLMatcher.grammar_from_json_schema}
    matcher = LLMatcher(vocabulary.made, written[grammar.kind](grammar.text))
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar.text}"
    tokens = vocabulary.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def called(name: str, *calls: tuple[str, dict[str, object]], text: str = "") -> str:
    return answer_text(TEMPLATES[name], calls, text=text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_must_come_is_written_as_the_template_writes_it(name: str) -> None:
    grammar = rules(name, must_call=True).grammar(may_think=False)

    assert matches(grammar, called(name, ("f", _RIGHT)))
    assert matches(grammar, called(name, ("g", _RIGHT), ("f", {"a": "", "b": -1})))
    assert not matches(grammar, "hello")
    assert not matches(grammar, called(name, ("h", _RIGHT)))
    assert not matches(grammar, called(name, ("f", {"a": "x", "b": "no"})))
    assert not matches(grammar, called(name, ("f", {"a": "x"})))
    assert not matches(grammar, called(name, ("f", {**_RIGHT, "c": "z"})))


@pytest.mark.parametrize("name", TEMPLATES)
def test_where_one_call_is_allowed_a_second_is_not(name: str) -> None:
    grammar = rules(name, must_call=True, allows_several=False).grammar(may_think=False)

    assert matches(grammar, called(name, ("f", _RIGHT)))
    assert not matches(grammar, called(name, ("f", _RIGHT), ("f", _RIGHT)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_with_strict_tools_any_text_goes_and_a_call_that_begins_follows_its_schema(name: str) -> None:
    grammar = rules(name).grammar(may_think=False)

    assert matches(grammar, "hello <b>there</b>\n")
    assert matches(grammar, called(name, ("f", _RIGHT)))
    assert not matches(grammar, called(name, ("f", {"a": "x", "b": "no"})))
    if TOOL_FORMATS[name].mark:
        assert matches(grammar, called(name, ("f", _RIGHT), text="I look."))
        assert not matches(grammar, called(name, ("f", {"a": "x", "b": "no"}), text="I look."))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_of_a_custom_tool_matches_its_regular_expression(name: str) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": r'[a-z/]+\n"[0-9]{2}"|x y'}
    given: dict[str, object] = {"name": "f", "format": form}
    tool = read_custom_tool(JsonBody(given), "tools[0]", given, lambda body: body)
    grammar = rules(name, tools=[tool], must_call=True).grammar(may_think=False)

    assert matches(grammar, called(name, ("f", {"input": 'a/b\n"12"'})))
    assert matches(grammar, called(name, ("f", {"input": "x y"})))
    for wrong in ('a/b\n"1"', "x y z", "", "x yx y"):
        assert not matches(grammar, called(name, ("f", {"input": wrong})))


_OPTIONAL = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": ["boolean", "null"]},
        "c": {"type": "string"},
        "d": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["c"],
}


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('[f(c="x")]', True),
        ('[f(a=1, c="x")]', True),
        ('[f(a=1, b=True, c="x", d={"x": true})]', True),
        ('[f(b=None, c="x")]', True),
        ('[f(c="x", d={"x": false})]', True),
        ('[f(c="x"), g()]', True),
        ("[g()]", True),
        ('<|python_start|>[f(c="x")]<|python_end|>', True),
        ('<|python_start|>[f(c="x")]', False),
        ("[f()]", False),
        ("[f(a=1)]", False),
        ('[f(c="x",)]', False),
        ('[f(c="x", a=1)]', False),
        ('[f(b=true, c="x")]', False),
        ("[f(c=x)]", False),
        ("[]", False),
        ("[g(a=1)]", False),
    ],
)
@pytest.mark.parametrize("vocabulary", [_WITH_SPECIAL, _WITHOUT_SPECIAL])
def test_parameters_in_pythons_syntax_come_in_order_and_optional_ones_may_be_left_out(
    text: str, is_right: bool, vocabulary: Vocabulary
) -> None:
    tools = [Tool("f", _OPTIONAL, {}), Tool("g", None, {})]
    special = _IDS if vocabulary is _WITH_SPECIAL else {}
    found = AnswerRules(TOOL_FORMATS["llama4_pythonic"], tools, True, True, None, special)

    assert matches(found.grammar(may_think=False), text, vocabulary) == is_right


@pytest.mark.parametrize("vocabulary", [_WITHOUT_SPECIAL, _WITH_WORDS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_need_not_be_special(name: str, vocabulary: Vocabulary) -> None:
    grammar = rules(name, special_tokens={}).grammar(may_think=False)
    text = "I look." if TOOL_FORMATS[name].mark else ""

    assert matches(grammar, called(name, ("f", _RIGHT), text=text), vocabulary)
    assert not matches(grammar, called(name, ("f", {"a": "x", "b": "no"}), text=text), vocabulary)


@pytest.mark.parametrize("vocabulary", [_WITH_SPECIAL, _WITHOUT_SPECIAL])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("before", ["", "\n", " \n\n"])
def test_a_call_after_a_thought_is_as_strict(name: str, vocabulary: Vocabulary, before: str) -> None:
    special = _IDS if vocabulary is _WITH_SPECIAL else {}
    grammar = rules(name, special_tokens=special).grammar(may_think=True)
    thought = f"{before}<think>\nhm\n</think>\n\n"

    assert matches(grammar, f"{thought}hello", vocabulary)
    assert matches(grammar, "hello", vocabulary)
    assert matches(grammar, thought + called(name, ("f", _RIGHT)), vocabulary)
    assert not matches(grammar, thought + called(name, ("f", {"a": "x", "b": "no"})), vocabulary)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_output_may_be_replaced_by_calls_but_by_nothing_else(name: str) -> None:
    grammar = rules(name, output=JSON_OBJECT).grammar(may_think=False)

    assert matches(grammar, '{"any": "thing"}')
    assert matches(grammar, '{"name": "Ann", "age": 3}')
    assert matches(grammar, called(name, ("f", _RIGHT)))
    assert not matches(grammar, "hello")


@pytest.mark.parametrize("vocabulary", [_WITH_SPECIAL, _WITHOUT_SPECIAL, _WITH_WORDS])
def test_a_thought_comes_before_what_is_constrained(vocabulary: Vocabulary) -> None:
    special = _IDS if vocabulary is _WITH_SPECIAL else {}
    found = rules("hermes", must_call=True, special_tokens=special)
    call = called("hermes", ("f", _RIGHT))

    assert matches(found.grammar(may_think=True), f"<think>\nhm {call}\n</think>\n\n{call}", vocabulary)
    assert matches(found.grammar(may_think=True), f"\n<think>hm</think>\n{call}", vocabulary)
    assert matches(found.grammar(may_think=True), call, vocabulary)
    assert not matches(found.grammar(may_think=True), f"<think>\nhm</think>{call[1:]}", vocabulary)
    assert not matches(found.grammar(may_think=False), f"<think>\nhm</think>{call}", vocabulary)
    assert matches(found.grammar_in_thought(), f"hm\n</think>\n\n{call}", vocabulary)
    assert not matches(found.grammar_in_thought(), call, vocabulary)


@pytest.mark.parametrize(
    ("output", "right", "wrong"),
    [
        (Grammar("regex", r"a/b\/c\n?"), "a/b/c", "a/b"),
        (Grammar("regex", "a\nb"), "a\nb", "a b"),
        (Grammar("lark", 'start: "a" rule_0\nrule_0: "b"+'), "abb", "a"),
        (Grammar("json_schema", '{"type": "integer"}'), "12", '"12"'),
    ],
)
def test_an_output_of_any_kind_comes_after_a_thought(output: Grammar, right: str, wrong: str) -> None:
    grammar = rules(None, output=output).grammar(may_think=True)

    assert matches(grammar, f"<think>hm</think>\n{right}")
    assert matches(grammar, f"\n<think>hm</think>\n{right}"), "as GLM-4.5's template writes it"
    assert not matches(grammar, f"{' ' * 9}<think>hm</think>\n{right}")
    assert matches(grammar, right)
    assert not matches(grammar, wrong)
    assert not matches(grammar, f"<think>hm</think>\n{wrong}")


def test_where_any_answer_is_right_there_is_no_grammar() -> None:
    free = AnswerRules(TOOL_FORMATS["hermes"], [Tool("f", None, {})], False, True, None, {})

    assert free.is_free
    assert free.grammar(may_think=True) is None
    assert free.grammar_in_thought() is None
