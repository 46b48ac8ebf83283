"""Copies of a compiled grammar: as many as concurrent answers need, and all alike."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvtier.engine.constraint import compiler
from kvtier.engine.constraint.compiled import CompiledGrammar
from kvtier.engine.constraint.compiler import GrammarCompiler
from kvtier.engine.grammar import Grammar
from kvtier.models.tokenizer import Tokenizer
from kvtier.testing.tiny_models import VOCAB_SIZE, make_tiny_tokenizer

END = 256
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "tags": {"type": "array", "items": {"enum": ["a", 1]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
SIMPLE = Grammar("json_schema", json.dumps(PERSON))
COSTLY = Grammar("json_schema", json.dumps({"allOf": [PERSON]}))
"""It may be hostile, so it is compiled once only."""


@pytest.fixture
def grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    """On a machine where four threads make masks."""
    monkeypatch.setattr(compiler, "num_mask_threads", lambda: 4)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    return GrammarCompiler(Tokenizer(tmp_path), VOCAB_SIZE, [END])


def copies_of(compiled: CompiledGrammar, num_answers: int) -> list[object]:
    return [compiled.take_copy() for _ in range(num_answers)]


def test_answers_that_run_alone_share_one_copy(grammars: GrammarCompiler) -> None:
    for _ in range(5):
        compiled = grammars.compile(SIMPLE)
        copy = compiled.take_copy()
        copy.give_back()

    assert compiled.num_copies == 1


def test_concurrent_answers_have_a_copy_each_up_to_the_number_of_threads(grammars: GrammarCompiler) -> None:
    for _ in range(3):
        compiled = grammars.compile(SIMPLE)
    assert compiled.num_copies == 3
    assert len(set(copies_of(compiled, 3))) == 3

    for _ in range(9):
        compiled = grammars.compile(SIMPLE)

    assert compiled.num_copies == 4
    copies_of(compiled, 9)
    assert sorted(copy.num_users for copy in compiled._copies) == [3, 3, 3, 3]


def test_answers_of_one_prompt_are_concurrent(grammars: GrammarCompiler) -> None:
    assert grammars.compile(SIMPLE, 3).num_copies == 3


def test_an_answer_that_ends_leaves_its_copy_to_the_next(grammars: GrammarCompiler) -> None:
    compiled = grammars.compile(SIMPLE, 2)
    first, second = compiled.take_copy(), compiled.take_copy()

    second.give_back()

    assert grammars.compile(SIMPLE).take_copy() is second
    assert compiled.num_copies == 2
    assert (first.num_users, second.num_users) == (1, 1)


def test_a_grammar_that_may_be_costly_has_one_copy(grammars: GrammarCompiler) -> None:
    assert grammars.compile(COSTLY, 9).num_copies == 1


def test_further_copies_are_bounded_over_all_grammars(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy of each stays, and so do copies in use."""
    monkeypatch.setattr(compiler, "MAX_KEPT_COPIES", 5)
    oldest = grammars.compile(SIMPLE, 4)
    [*_, used] = [oldest.take_copy() for _ in range(4)]
    old = grammars.compile(Grammar("regex", "a+"), 2)

    newest = grammars.compile(Grammar("regex", "b+"), 4)

    assert [one.num_copies for one in (oldest, old, newest)] == [1, 2, 4]
    assert used.matcher().compute_bitmask() == oldest.take_copy().matcher().compute_bitmask()


def test_all_copies_allow_the_same_tokens(grammars: GrammarCompiler) -> None:
    """Along random answers, whatever the copies have learned of others before."""
    compiled = grammars.compile(SIMPLE, 4)
    dice = random.Random(0)
    for _ in range(20):
        matchers = [compiled.take_copy().matcher() for _ in range(4)]
        for _ in range(60):
            masks = {matcher.compute_bitmask() for matcher in matchers}
            assert len(masks) == 1
            allowed = int.from_bytes(masks.pop(), "little")
            token = dice.choice([token for token in range(VOCAB_SIZE) if allowed >> token & 1])
            assert all(matcher.consume_token(token) for matcher in matchers)
            if matchers[0].is_stopped():
                break
