"""Which tokens the rows of a step may have, from step to step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.engine.constraint.compiler import GrammarCompiler
from kvtier.engine.constraint.constraints import Constraints, TokenMasks
from kvtier.engine.grammar import Grammar
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.request import Request
from kvtier.errors import AnswerFailed, InvalidGrammar
from kvtier.models.tokenizer import Tokenizer
from kvtier.testing.tiny_models import VOCAB_SIZE, make_tiny_tokenizer

END = 256


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(folder)
    return GrammarCompiler(Tokenizer(folder), VOCAB_SIZE, [END])


@pytest.fixture
def constraints(grammars: GrammarCompiler) -> Iterator[Constraints]:
    made = Constraints(VOCAB_SIZE, [END], grammars.drop)
    yield made
    made.close()


def begin(constraints: Constraints, grammars: GrammarCompiler, pattern: str | None) -> Request:
    grammar = None if pattern is None else Grammar("regex", pattern)
    request = Request("one", [1, 2], SamplingParams(grammar=grammar, ignore_eos=True), max_tokens=9)
    request.num_in_flight = 1
    if grammar is not None:
        constraints.add(request, grammars.compile(grammar))
    return request


def allowed(constraints: Constraints, requests: list[Request]) -> dict[int, str]:
    """By row: the characters that may come next."""

    def make(num_rows: int, num_words: int) -> TokenMasks:
        return TokenMasks(np.zeros(num_rows, np.int64), np.zeros((num_rows, num_words), np.int32))

    masks = constraints.masks(requests, make, lambda: None)
    if masks is None:
        return {}
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")[:, :256]
    texts = ["".join(map(chr, np.flatnonzero(row))) for row in bits]
    return dict(zip(masks.rows.tolist(), texts, strict=True))


def take(constraints: Constraints, requests: list[Request], text: str) -> None:
    """The next token of each of `requests` is one of `text`."""
    constraints.advance([(request, ord(token)) for request, token in zip(requests, text, strict=True)])
    for request, token in zip(requests, text, strict=True):
        request.tokens.append(ord(token))


@pytest.mark.parametrize("count", [1, 12])
def test_each_row_has_its_own_mask_whatever_rows_are_beside_it(
    constraints: Constraints, grammars: GrammarCompiler, count: int
) -> None:
    free = begin(constraints, grammars, None)
    longs = [begin(constraints, grammars, "[ab]x[cd]y") for _ in range(count)]
    short = begin(constraints, grammars, "k[mn]")
    step = [short, free, *longs]
    rest = range(2, 2 + count)

    assert allowed(constraints, step) == {0: "k", **dict.fromkeys(rest, "ab")}
    take(constraints, step, "k?" + count * "a")
    assert allowed(constraints, step) == {0: "mn", **dict.fromkeys(rest, "x")}
    take(constraints, step, "m!" + count * "x")
    assert constraints.end_of(short) == 2
    assert allowed(constraints, step) == dict.fromkeys(rest, "cd"), "the first one has ended"
    constraints.forget(short)
    late = begin(constraints, grammars, "[pq]")
    step = [free, *longs, late]
    assert allowed(constraints, step) == {**dict.fromkeys(range(1, 1 + count), "cd"), 1 + count: "pq"}
    constraints.rewind(longs[0])
    assert allowed(constraints, step) == {**dict.fromkeys(range(1, 1 + count), "cd"), 1 + count: "pq"}


def test_a_row_that_fails_is_free_and_its_request_alone_is_told(
    constraints: Constraints, grammars: GrammarCompiler
) -> None:
    step = [begin(constraints, grammars, "[ab]{4}") for _ in range(10)]
    allowed(constraints, step)

    take(constraints, step, "aaaaaaaaaz")

    assert allowed(constraints, step) == dict.fromkeys(range(9), "ab")
    assert [constraints.end_of(request) for request in step[:9]] == 9 * [None]
    with pytest.raises(AnswerFailed, match="the grammar could not be followed"):
        constraints.end_of(step[9])


def test_a_grammar_that_allows_nothing_more_is_an_error_of_the_request(
    constraints: Constraints, grammars: GrammarCompiler
) -> None:
    grammar = Grammar("lark", 'start: /[ab]/ x\nx: x "c"')
    request = Request("one", [1, 2], SamplingParams(grammar=grammar), max_tokens=9)
    request.num_in_flight = 1
    constraints.add(request, grammars.compile(grammar))
    allowed(constraints, [request])
    assert constraints.end_of(request) is None

    take(constraints, [request], "a")
    allowed(constraints, [request])

    with pytest.raises(InvalidGrammar, match="the grammar allows no answer from here"):
        constraints.end_of(request)


def test_one_mask_wakes_no_other_thread(constraints: Constraints, grammars: GrammarCompiler) -> None:
    step = [begin(constraints, grammars, None), begin(constraints, grammars, "[ab]c")]

    assert allowed(constraints, step) == {1: "ab"}

    assert "kvtier-masks" not in [thread.name for thread in threading.enumerate()]
