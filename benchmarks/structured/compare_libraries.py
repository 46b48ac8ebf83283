"""llguidance beside xgrammar: the time to compile a schema and to make a mask, and the schemas that each can follow.

    python -m benchmarks.structured.compare_libraries [--quick] [--json FILE]

Both have the same made-up vocabulary of 151,000 tokens. Masks are those of one answer drawn at random; times are CPU
times. A schema is followed if it compiles, accepts a valid instance and rejects an invalid one; the others are refused,
or followed in part, which is worse. If xgrammar is not installed, llguidance is measured alone.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Result, finish, print_table
from benchmarks.structured.test_json_schema import SCHEMA
from benchmarks.structured.vocabulary import make_tokenizer
from kvtier.engine.constraint.compiler import GrammarCompiler
from kvtier.engine.grammar import Grammar
from kvtier.errors import InvalidParameter
from kvtier.models.tokenizer import Tokenizer

_NUM_TOKENS = 151_000
_ONE = {"type": "object", "additionalProperties": False}
Case = tuple[str, dict[str, Any], Any, Any]
CASES: Sequence[Case] = (
    ("enum of several types", {"enum": [1, "a", None]}, None, 2),
    ("bounds of a number", {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2}, 1.25, 2),
    ("bounds of an integer", {"type": "integer", "minimum": 10, "maximum": 1000}, 999, 1001),
    ("multiples", {"type": "integer", "multipleOf": 7}, 21, 22),
    ("lengths of a string", {"type": "string", "minLength": 2, "maxLength": 3}, "abc", "abcd"),
    ("pattern", {"type": "string", "pattern": "^a+b$"}, "aab", "ba"),
    ("pattern and length", {"type": "string", "pattern": "^a+$", "maxLength": 3}, "aa", "aaaa"),
    ("date", {"type": "string", "format": "date"}, "2024-02-10", "2024-13-10"),
    ("uuid", {"type": "string", "format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000", "123"),
    ("numbers of items", {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, [True], []),
    ("items by place", {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}}, [1, 2], [2, 1]),
    ("optional properties", {**_ONE, "properties": {"a": {"type": "null"}, "b": {"const": 1}}}, {"b": 1}, {"b": 2}),
    ("required and more", {"type": "object", "required": ["a"], "properties": {"b": {"const": 1}}}, {"a": 0}, {"b": 1}),
    ("patternProperties", {**_ONE, "patternProperties": {"^x": {"type": "null"}}}, {"xa": None}, {"y": None}),
    ("additionalProperties", {"type": "object", "additionalProperties": {"type": "null"}}, {"k": None}, {"k": 1}),
    (
        "recursion",
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}},
        [[[]]],
        [1],
    ),
    ("anyOf", {"anyOf": [{"type": "null"}, {"type": "string"}]}, "a", 1),
    ("oneOf, disjoint", {"oneOf": [{"const": "a"}, {"type": "null"}]}, None, "b"),
    ("allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, 4, 6),
    (
        "minProperties",
        {"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}},
        {"a": None},
        {},
    ),
    ("uniqueItems", {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [1, 2], [1, 1]),
    ("not", {"type": "integer", "not": {"const": 3}}, 4, 3),
    ("if and then", {"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 6}}, 6, 9),
)


class Matcher(Protocol):
    """An answer's position in a grammar."""

    def mask(self, words: npt.NDArray[np.int32]) -> None: ...

    def take(self, token_id: int) -> bool: ...

    def may_end(self) -> bool: ...

    def is_over(self) -> bool: ...


class _LlguidanceMatcher:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def mask(self, words: npt.NDArray[np.int32]) -> None:
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def take(self, token_id: int) -> bool:
        return bool(self._inner.try_consume_tokens([token_id]))

    def may_end(self) -> bool:
        return bool(self._inner.is_accepting())

    def is_over(self) -> bool:
        return bool(self._inner.is_stopped())


class _XgrammarMatcher:
    def __init__(self, inner: Any, end: int) -> None:
        self._inner = inner
        self._end = end

    def mask(self, words: npt.NDArray[np.int32]) -> None:
        torch = importlib.import_module("torch")
        self._inner.fill_next_token_bitmask(torch.from_numpy(words[None]), 0)

    def take(self, token_id: int) -> bool:
        return bool(self._inner.accept_token(token_id))

    def may_end(self) -> bool:
        return bool(self._inner.accept_token(self._end))

    def is_over(self) -> bool:
        return bool(self._inner.is_terminated())


Compile = Callable[[dict[str, Any]], Callable[[], Matcher]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller vocabulary, and fewer tokens")
    parser.add_argument("--json", metavar="FILE", help="write the result there; - for standard output")
    arguments = parser.parse_args(argv)
    num_tokens = 8000 if arguments.quick else _NUM_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(num_tokens).save_pretrained(folder)
        tokenizer = Tokenizer(Path(folder))
    result = Result("structured.compare_libraries", {"num_tokens": num_tokens, "quick": arguments.quick})
    for name, compile_ in _libraries(tokenizer, num_tokens).items():
        row, refused = _measure(compile_, tokenizer, num_tokens, num_answer=60 if arguments.quick else 300)
        result.rows.append({"library": name, **row})
        result.settings = {**result.settings, f"{name}_not_followed": refused}
    print_table(f"{num_tokens} tokens, {len(CASES)} schemas", result.rows)
    return finish(result, {}, arguments.json)


def _libraries(tokenizer: Tokenizer, num_tokens: int) -> dict[str, Compile]:
    (end,) = tokenizer.eos_token_ids
    found: dict[str, Compile] = {"llguidance": _llguidance(tokenizer, num_tokens, end)}
    if importlib.util.find_spec("xgrammar") is not None:
        found["xgrammar"] = _xgrammar(tokenizer, num_tokens, end)
    return found


def _llguidance(tokenizer: Tokenizer, num_tokens: int, end: int) -> Compile:
    grammars = GrammarCompiler(tokenizer, num_tokens, [end])

    def compile_(schema: dict[str, Any]) -> Callable[[], Matcher]:
        grammar = Grammar("json_schema", json.dumps(schema))
        grammars.drop(grammar)
        compiled = grammars.compile(grammar)
        return lambda: _LlguidanceMatcher(compiled.take_copy().matcher())

    compile_({})  # makes the vocabulary
    return compile_


def _xgrammar(tokenizer: Tokenizer, num_tokens: int, end: int) -> Compile:
    xgrammar = importlib.import_module("xgrammar")
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(num_tokens)]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=num_tokens, stop_token_ids=[end])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_(schema: dict[str, Any]) -> Callable[[], Matcher]:
        compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, strict_mode=False)
        return lambda: _XgrammarMatcher(xgrammar.GrammarMatcher(compiled), end)

    return compile_


def _measure(
    compile_: Compile, tokenizer: Tokenizer, num_tokens: int, num_answer: int
) -> tuple[dict[str, object], list[str]]:
    compile_s = []
    not_followed = []
    for name, schema, good, bad in CASES:
        started_at = time.process_time()
        try:
            make = compile_(schema)
        except (InvalidParameter, RuntimeError, ValueError) as error:
            not_followed.append(f"{name}: refused, {str(error)[:80]}")
            continue
        compile_s.append(time.process_time() - started_at)
        wrong = [text for value, is_good in ((good, True), (bad, False))
                 if _takes(make(), tokenizer, text := json.dumps(value, separators=(",", ":"))) != is_good]  # fmt: skip
        if wrong:
            not_followed.append(f"{name}: wrong about {wrong[0]}")
    started_at = time.process_time()
    make = compile_(SCHEMA)
    large_s = time.process_time() - started_at
    masks_us = _masks_us(make(), num_tokens, num_answer)
    num_refused = sum("refused" in one for one in not_followed)
    return {
        "compile, median ms": round(1000 * statistics.median(compile_s), 2),
        "a larger one, ms": round(1000 * large_s, 2),
        "mask, median us": round(statistics.median(masks_us), 1),
        "99 in 100, us": round(float(np.percentile(masks_us, 99)), 1),
        "followed": len(CASES) - len(not_followed),
        "refused": num_refused,
        "wrong": len(not_followed) - num_refused,
    }, not_followed


def _takes(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.take(token_id) for token_id in tokens) and (matcher.may_end() or matcher.is_over())


def _masks_us(matcher: Matcher, num_tokens: int, num_answer: int) -> list[float]:
    dice = np.random.default_rng(0)
    words = np.zeros(-(-num_tokens // 32), np.int32)
    seconds = []
    for _ in range(num_answer):
        started_at = time.process_time()
        matcher.mask(words)
        seconds.append(time.process_time() - started_at)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:num_tokens])
        matcher.take(int(dice.choice(allowed)))
    return [1e6 * one for one in seconds]


if __name__ == "__main__":
    sys.exit(main())
