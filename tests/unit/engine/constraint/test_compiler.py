"""Valid, invalid and hostile grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.engine.constraint import compiler, library
from kvtier.engine.constraint.compiled import CompiledGrammar
from kvtier.engine.constraint.compiler import GrammarCompiler
from kvtier.engine.constraint.vetting import is_plain
from kvtier.engine.grammar import JSON_OBJECT, Grammar, lark_inside, lark_text
from kvtier.errors import InvalidParameter
from kvtier.models.tokenizer import Tokenizer
from kvtier.testing.tiny_models import VOCAB_SIZE, make_tiny_tokenizer

END = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(folder)
    return Tokenizer(folder)


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, [END])


def schema_of(schema: Mapping[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def takes(compiled: CompiledGrammar, text: str) -> bool:
    """Whether `text` is a whole sentence of the grammar."""
    matcher = compiled.take_copy().matcher()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_answers_of_one_grammar_do_not_disturb_each_other(grammars: GrammarCompiler) -> None:
    compiled = grammars.compile(Grammar("regex", "abc"))
    first, second = compiled.take_copy().matcher(), compiled.take_copy().matcher()

    assert first.consume_token(ord("a"))
    assert second.consume_token(ord("a"))
    assert first.consume_token(ord("b"))


@pytest.mark.parametrize(
    ("grammar", "taken", "not_taken"),
    [
        (JSON_OBJECT, '{"a": [1, {"b": null}]}', "[1]"),
        (schema_of({"type": "integer"}), "12", "1.5"),
        (schema_of({"allOf": [{"type": "integer"}, {"minimum": 5}]}), "7", "4"),
        (Grammar("json_schema", "true"), '"anything"', "anything"),
        (schema_of({"type": "string", "format": "smoke-signal"}), '"puff"', "5"),
        (schema_of({"format": "int32", "type": ["integer", "string"]}), "5", "true"),
        (schema_of({"type": "string", "format": "date"}), '"2024-02-29"', '"2024-02-30"'),
        (schema_of({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}), "[1,1]", '["1"]'),
        (schema_of({"const": {"uniqueItems": False}}), '{"uniqueItems":false}', "{}"),
        (schema_of({"const": {"format": "int32"}}), '{"format":"int32"}', "{}"),
        (schema_of({"enum": [{"format": "int32"}]}), '{"format":"int32"}', "{}"),
        (
            schema_of({"properties": {"const": {"type": "string", "format": "byte"}}, "required": ["const"]}),
            '{"const":"x"}',
            '{"const":5}',
        ),
        (schema_of({"anyOf": [{"type": "null"}, {"type": "string", "format": "password"}]}), '"x"', "5"),
        (
            schema_of({"$ref": "#/$defs/format", "$defs": {"format": {"type": "string", "format": "binary"}}}),
            '"x"',
            "5",
        ),
        (Grammar("lark", 'start: %json {"type": "string", "format": "uri-template"}'), '"x"', "5"),
        (schema_of({"type": "array", "x-guidance": {"whitespace_pattern": "x+"}}), "[ ]", "[xx]"),
        (Grammar("regex", "a|b{2}"), "bb", "b"),
        (Grammar("regex", "/a/"), "/a/", "a"),
        (Grammar("lark", 'start: "a" "b"?'), "ab", "b"),
        (Grammar("lark", 'start: %json {"type": "null"} "!"'), "null!", "null"),
        (Grammar("lark", 'start: a | b\na: %json {"const": "%json {"}\nb: "x"'), '"%json {"', "%json {"),
        (Grammar("lark", 'root ::= "a" b\nb ::= "c"+'), "acc", "a"),
        (Grammar("lark", 'start: "x" inner\ninner: ' + lark_inside('root ::= "a" b\nb ::= "c"+')), "xacc", "acc"),
        (Grammar("lark", "start: inner\ninner: " + lark_inside('start: "}" | "a ::= b"')), "a ::= b", "a"),
        (Grammar("lark", f"start: {lark_text('%json {} é')}"), "%json {} é", "{} é"),
    ],
    ids=lambda one: one.text[:20] if isinstance(one, Grammar) else None,
)
def test_a_grammar_takes_its_sentences(grammars: GrammarCompiler, grammar: Grammar, taken: str, not_taken: str) -> None:
    compiled = grammars.compile(grammar)

    assert takes(compiled, taken)
    assert not takes(compiled, not_taken)


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (Grammar("json_schema", "{"), "the schema is not JSON"),
        (Grammar("json_schema", "[]"), "the schema must be a JSON object"),
        (schema_of({"type": "object", "not": {}}), "Unimplemented keys"),
        (schema_of({"type": "string", "format": 5}), "the grammar cannot be compiled"),
        (schema_of({"type": "colour"}), "colour"),
        (schema_of({"$ref": "#"}), "the schema allows no answer"),
        (
            schema_of({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}),
            "the schema allows no answer",
        ),
        (Grammar("lark", 'start: /(.|\n)*/ "<end>" %json {"$ref": "#"}'), "the schema allows no answer"),
        (Grammar("lark", 'start: "a" x\nx: x "b"'), "it allows no answer"),
        (Grammar("lark", 'start: "a" x\nx: "long" x'), "Too many items"),
        (schema_of({"$ref": "#/$defs/nowhere"}), "nowhere"),
        (schema_of({"$ref": "http://127.0.0.1:9/schema"}), "the grammar cannot be compiled"),
        (schema_of({"enum": []}), "the grammar cannot be compiled"),
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("regex", "(?=a)b"), "look"),
        (Grammar("lark", "start: nothing"), "unknown name"),
        (Grammar("lark", "start: <|no-such-token|>"), "the grammar cannot be compiled"),
        (Grammar("lark", 'begin: "a"'), "the grammar cannot be compiled"),
        (Grammar("lark", "%json"), "the grammar cannot be compiled"),
        (Grammar("lark", 'rule ::= "a"'), "root"),
    ],
    ids=lambda one: one.text[:20] if isinstance(one, Grammar) else None,
)
def test_a_wrong_grammar_is_told_in_one_sentence(grammars: GrammarCompiler, grammar: Grammar, sentence: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        grammars.compile(grammar)

    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_grammar_with_a_long_beginning_is_compiled_and_followed(grammars: GrammarCompiler) -> None:
    """Looking where it leads must not use up what its answers need."""
    for text in ('start: x{30000} "c"\nx: "a"', "start: /a{30000}c/"):
        matcher = grammars.compile(Grammar("lark", text)).take_copy().matcher()
        matcher.compute_bitmask()
        assert matcher.consume_token(ord("a"))
        matcher.compute_bitmask()
        assert not matcher.is_error()


def test_equal_grammars_are_compiled_once_and_few_are_kept(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_KEPT", 3)
    made = [grammars.compile(Grammar("regex", f"a{{{number}}}")) for number in (1, 2, 3)]

    assert grammars.compile(Grammar("regex", "a{1}")) is made[0]
    grammars.compile(Grammar("regex", "a{4}"))
    assert grammars.find(Grammar("regex", "a{2}")) is None, "the one that was used longest ago"
    assert grammars.find(Grammar("regex", "a{1}")) is made[0]


def test_the_text_of_all_that_is_kept_is_bounded(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_KEPT_CHARACTERS", 40)
    texts = [number * "a" for number in (30, 20, 15)]
    for text in texts:
        grammars.compile(Grammar("regex", text))

    assert [grammars.find(Grammar("regex", text)) is not None for text in texts] == [False, True, True]


def test_a_grammar_that_is_dropped_is_compiled_anew(grammars: GrammarCompiler) -> None:
    grammar = Grammar("regex", "a")
    first = grammars.compile(grammar)
    grammars.drop(grammar)
    grammars.drop(grammar)

    assert grammars.compile(grammar) is not first


def test_without_the_library_a_grammar_is_refused(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_module", lambda: None)

    with pytest.raises(InvalidParameter, match=r"pip install 'kvtier\[structured\]'"):
        grammars.compile(JSON_OBJECT)


def test_a_tokenizer_that_is_absent_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="needs a tokenizer"):
        GrammarCompiler(Tokenizer(tmp_path), VOCAB_SIZE, [END]).compile(JSON_OBJECT)


# --- harm -------------------------------------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def crossed(width: int, depth: int) -> dict[str, Any]:
    """As many objects as `width ** depth`."""
    one = {"type": "object", "properties": {}}
    return {
        "allOf": [
            {"anyOf": [{**one, "properties": {f"p{number}{way}": {}}} for way in range(width)]}
            for number in range(depth)
        ]
    }


HARMFUL = {
    "deep": schema_of(nested(60)),
    "many-values": schema_of({"enum": [f"value {number}" for number in range(10_000)]}),
    "long-string": schema_of({"type": "string", "maxLength": 100_000_000}),
    "long-list": schema_of({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}),
    "recursive": schema_of({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}, "type": "array"}}, "$ref": "#/$defs/a"}),
    "loop": schema_of({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "pattern": schema_of({"type": "string", "pattern": "^(((a{1,99}){1,99}){1,99}){1,99}$"}),
    "remainders": schema_of({"type": "integer", "multipleOf": 999_983}),
    "crossed": schema_of(crossed(6, 12)),
    "properties": schema_of({"type": "object", "properties": {f"k{number}": {} for number in range(9000)}}),
    "regex-states": Grammar("regex", "(a|b)*a(a|b){60}"),
    "regex-repeats": Grammar("regex", "(((a{1,999}){1,999}){1,999}){1,999}"),
    "regex-brackets": Grammar("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "lark-brackets": Grammar("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "lark-doubles": Grammar("lark", "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(60)) + 'a60: "x"\nstart: a0'),
    "lark-empty": Grammar("lark", 'start: start start | ""'),
    "lark-repeats": Grammar("lark", 'start: a{1,9999}\na: b{1,9999}\nb: "x" | "y"'),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_no_grammar_hangs_or_takes_much_memory(grammars: GrammarCompiler, name: str) -> None:
    """The grammar is refused in one sentence, or gives allowed tokens for an answer of any length."""
    before = _resident_bytes()
    compiled, sentence = None, ""
    try:
        compiled = grammars.compile(HARMFUL[name])
    except InvalidParameter as error:
        sentence = str(error)
    if compiled is not None:
        _write(compiled)
    assert "\n" not in sentence
    assert _resident_bytes() - before < 256 << 20


def _write(compiled: CompiledGrammar) -> None:
    matcher = compiled.take_copy().matcher()
    for number in range(40):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped():
            break
        tokens = [token for token in range(VOCAB_SIZE) if allowed >> token & 1]
        assert tokens, "an answer that is not complete can go on"
        matcher.consume_token(tokens[7 * number % len(tokens)])


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("name", ["remainders", "crossed", "properties", "many-values"])
def test_what_may_do_harm_is_tried_in_a_process_of_its_own(name: str) -> None:
    assert not is_plain(json.loads(HARMFUL[name].text))


def test_an_everyday_schema_needs_no_process() -> None:
    person = {
        "title": "Person",
        "type": "object",
        "properties": {f"field_{number}": {"type": "string", "description": "x" * 80} for number in range(40)},
        "required": ["field_1"],
        "additionalProperties": False,
        "$defs": {"other": {"anyOf": [{"type": "null"}, {"type": "integer", "multipleOf": 5}]}},
    }

    assert is_plain(person)
    assert not is_plain({"items": [person] * 3})
    assert not is_plain({"multipleOf": 0.1})
    assert not is_plain({"allOf": [{"multipleOf": 7}, {"multipleOf": 11}]})
    assert not is_plain({"pattern": "a" * 1000})


def test_a_length_that_a_client_makes_up_does_no_harm(grammars: GrammarCompiler) -> None:
    nested = "%lark {\n// 999999 characters\nstart: " * 5_000
    text = f'start: {nested} "a ::= b"'

    with pytest.raises(InvalidParameter):
        grammars.compile(Grammar("lark", text))
