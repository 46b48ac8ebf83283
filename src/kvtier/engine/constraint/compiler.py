"""Compiles and caches grammars, on the threads that submit prompts and not in the engine's steps. Thread-safe."""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING

from kvtier.engine.constraint.compiled import CompiledGrammar, num_mask_threads
from kvtier.engine.constraint.endless import can_end
from kvtier.engine.constraint.formats import with_known_formats
from kvtier.engine.constraint.library import llguidance
from kvtier.engine.constraint.vetting import error_ahead, is_plain, limits, reason, vet
from kvtier.engine.constraint.vocabulary import make_vocabulary
from kvtier.engine.grammar import LARK_INSIDE, TEMPLATE_SPACING, Grammar
from kvtier.errors import InvalidParameter
from kvtier.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT = 64
MAX_KEPT_CHARACTERS = 4 << 20
"""The limit for all cached grammars together. A compiled grammar grows with its text and is bounded (`limits`)."""
MAX_KEPT_COPIES = 64
"""The limit for all cached grammars together, not counting the first copy of each."""

_WHITESPACE = r"[ ]|\n[ ]{0,32}"
"""Allowed between the tokens of JSON: a space, or a new line with indentation. The bound keeps a model from writing
blanks forever."""

_JSON_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
_GBNF_MARK = "::="
_LARK_START = "start:"
_MAX_GBNF_CHARACTERS = 32 << 10
_MAX_JSON_PARTS = 512
_MAX_PLAIN_LARK = 32 << 10
_MAX_PLAIN_REGEX = 4 << 10
_NEVER_ENDS = "the schema allows no answer: a part of it that is required requires itself again, without end"
_COSTLY_LARK = re.compile(r"[&~]|%(?!json\b|ignore\b)")
"""Intersections, complements and nested grammars."""


class GrammarCompiler:
    """The compiler for one model. It keeps the most recently used grammars."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._num_characters = 0

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        """The compiled grammar, if it is cached."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
            return found

    def compile(self, grammar: Grammar, num_answers: int = 1) -> CompiledGrammar:
        """Compile a grammar, or find it, for a number of answers, which will take their copies of it soon.

        Raises `InvalidParameter` if it is wrong or unsupported.
        """
        compiled = self.find(grammar) or self._compile(grammar)
        compiled.announce(num_answers, num_mask_threads())
        self._bound_copies(compiled)
        return compiled

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        definition, is_harmless = _definition(grammar)
        vocabulary = self._get_vocabulary()
        if not is_harmless:
            vet(definition, self._special_tokens())

        def recompile() -> LLMatcher:
            made: LLMatcher = llguidance().LLMatcher(vocabulary, definition, log_level=0, limits=limits())
            return made

        start = recompile()
        if not start.is_error():
            start.compute_bitmask()  # some errors show only at the first token
        error = start.get_error()
        if not error and is_harmless and grammar.kind == "lark":
            error = error_ahead(recompile())
        if error:
            raise InvalidParameter(f"the grammar cannot be compiled: {reason(error)}")
        compiled = CompiledGrammar(start, -(-vocabulary.vocab_size // 32), recompile if is_harmless else None)
        self._keep(grammar, compiled)
        return compiled

    def drop(self, grammar: Grammar) -> None:
        """Compile the grammar anew next time: answers share some of its memory, which may be used up."""
        with self._lock:
            if self._kept.pop(grammar, None) is not None:
                self._num_characters -= len(grammar.text)

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        with self._lock:
            if grammar not in self._kept:
                self._num_characters += len(grammar.text)
            self._kept[grammar] = compiled
            while len(self._kept) > MAX_KEPT or self._num_characters > MAX_KEPT_CHARACTERS:
                oldest, _ = self._kept.popitem(last=False)
                self._num_characters -= len(oldest.text)

    def _bound_copies(self, newest: CompiledGrammar) -> None:
        """Grammars that were used longest ago lose their further copies first."""
        with self._lock:
            num_more = sum(compiled.num_copies - 1 for compiled in self._kept.values())
            for compiled in self._kept.values():
                if num_more <= MAX_KEPT_COPIES:
                    return
                if compiled is not newest:
                    num_more -= compiled.num_copies - 1
                    compiled.drop_copies()

    def _special_tokens(self) -> list[str]:
        tokenizer = self._tokenizer
        assert tokenizer is not None, "there is a vocabulary"
        return [tokenizer.token_text(token_id) for token_id in sorted(tokenizer.special_token_ids)]

    def _get_vocabulary(self) -> LLTokenizer:
        llguidance()
        if self._tokenizer is None or self._tokenizer.is_absent:
            raise InvalidParameter("a grammar needs a tokenizer, and this model has none")
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = make_vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary


def _definition(grammar: Grammar) -> tuple[str, bool]:
    """The grammar in the library's form, and whether it is plainly harmless."""
    if grammar.kind == "json_schema":
        schema = _schema(grammar.text)
        return _grammars({"json_schema": _with_options(schema)}), is_plain(schema)
    if grammar.kind == "regex":
        definition: str = llguidance().LLMatcher.grammar_from_regex(grammar.text)
        return definition, len(grammar.text) <= _MAX_PLAIN_REGEX
    text, schemas = _with_options_inside(_in_lark(grammar.text))
    is_harmless = len(grammar.text) <= _MAX_PLAIN_LARK and not _COSTLY_LARK.search(grammar.text) and is_plain(schemas)
    return _grammars({"lark_grammar": text}), is_harmless


def _in_lark(text: str) -> str:
    """The whole grammar in Lark's syntax: converts rules with `::=`, alone or inside other rules."""
    if not text.startswith(_LARK_START):
        return _from_gbnf(text) if _GBNF_MARK in text else text
    if _GBNF_MARK not in text:
        return text
    pieces: list[str] = []
    end = 0
    for mark in LARK_INSIDE.finditer(text):
        if mark.start() >= end:
            pieces.append(text[end : mark.end()])
            end = mark.end() + int(mark[1])
            inner = text[mark.end() : end]
            pieces.append(_from_gbnf(inner) if _GBNF_MARK in inner else inner)
    return "".join([*pieces, text[end:]])


def _from_gbnf(text: str) -> str:
    """Converts rules written with `::=`, as in the documents of llama.cpp and vLLM, to Lark's syntax."""
    if len(text) > _MAX_GBNF_CHARACTERS:
        raise InvalidParameter(f"a grammar with ::= must not have more than {_MAX_GBNF_CHARACTERS} characters")
    try:
        return str(importlib.import_module("llguidance.gbnf_to_lark").any_to_lark(text))
    except Exception as error:  # the library raises exceptions of any type
        raise InvalidParameter(f"the grammar cannot be compiled: {reason(str(error))}") from None


def _grammars(one: dict[str, object]) -> str:
    return json.dumps({"grammars": [one]})


def _schema(text: str) -> dict[str, object]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"the schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidParameter("the schema must be a JSON object")
    return schema


def _with_options(schema: dict[str, object]) -> dict[str, object]:
    """Keeps known formats only, and bounds blanks; in tool calls they already are as the template writes them."""
    is_spaced = schema.get("x-guidance") == TEMPLATE_SPACING
    try:
        kept = with_known_formats(schema)
        if not can_end(kept):
            raise InvalidParameter(_NEVER_ENDS)
    except RecursionError:
        raise InvalidParameter("the schema is nested too deeply") from None
    return {**kept, "x-guidance": TEMPLATE_SPACING if is_spaced else _JSON_OPTIONS}


def _with_options_inside(lark: str) -> tuple[str, list[object]]:
    """The grammar with blanks bounded in its `%json` parts, and the schemas of these parts."""
    decoder = json.JSONDecoder()
    pieces: list[str] = []
    schemas: list[object] = []
    end = 0
    for mark in re.finditer(r"%json\s*+(?=\{)", lark):
        if mark.start() < end:
            continue  # inside a schema
        if len(schemas) >= _MAX_JSON_PARTS:
            raise InvalidParameter(f"a grammar must not have more than {_MAX_JSON_PARTS} schemas inside")
        try:
            schema, schema_end = decoder.raw_decode(lark, mark.end())
        except (ValueError, RecursionError):
            continue  # the library reports the error
        schemas.append(schema)
        pieces += [lark[end : mark.end()], json.dumps(_with_options(schema))]
        end = schema_end
    return "".join([*pieces, lark[end:]]), schemas
