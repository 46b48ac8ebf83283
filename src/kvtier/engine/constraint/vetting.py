"""Compiles a possibly hostile grammar within limits, in a process that may be killed.

The library bounds the cost of a step, but not of building a grammar: a schema of a few lines can take minutes and
gigabytes. `python -m kvtier.engine.constraint.vetting` reads a `GrammarSource` from its standard input and
writes what is wrong with the grammar to its standard output. Plainly harmless grammars (`is_plain`) are not tried.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from kvtier.engine.constraint.library import llguidance
from kvtier.errors import InvalidParameter

if TYPE_CHECKING:
    from llguidance import LLMatcher

_CPU_S = 2
_WALL_S = 30.0
_MEMORY_BYTES = 768 << 20
"""Address space, including 200 MiB for the interpreter."""

_MAX_PLAIN_VALUES = 400
_MAX_PLAIN_WIDTH = 100
_MAX_PLAIN_CHARACTERS = 16 << 10
_MAX_PLAIN_PATTERN = 128
_MAX_PLAIN_MULTIPLE = 1000
_COSTLY = {"allOf", "patternProperties", "propertyNames", "dependentSchemas", "contains", "not", "if", "oneOf"}
_NO_ANSWER = "NoExtensionBias"
_MAX_BEGINNING = 64
"""Tokens of a grammar's beginning that are tried."""

_MAX_ERROR_CHARACTERS = 4096
_REASON_CHARACTERS = 300
_TOO_COMPLEX = "the grammar is too complex: compiling it exceeds the limits on time or memory"


class GrammarSource(msgspec.Struct, frozen=True):
    """A grammar in the library's own words, and the special tokens that it may name."""

    definition: str
    special_tokens: Sequence[str]


class _Bytes:
    """A tokenizer for llguidance with single bytes and special tokens. A grammar built with it costs about the same."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = None

    def __init__(self, special_tokens: Sequence[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [token.encode() for token in special_tokens]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def is_plain(schema: object) -> bool:
    """Whether a JSON schema is so small and simple that compiling it takes milliseconds."""
    left = [schema]
    num_values = num_characters = 0
    while left:
        value = left.pop()
        num_values += 1
        if isinstance(value, dict):
            if value.keys() & _COSTLY or len(value) > _MAX_PLAIN_WIDTH:
                return False
            pattern, multiple = value.get("pattern"), value.get("multipleOf")
            if isinstance(pattern, str) and len(pattern) > _MAX_PLAIN_PATTERN:
                return False
            if isinstance(multiple, (int, float)) and not _is_small_multiple(multiple):
                return False
            num_characters += sum(map(len, value))
            left += value.values()
        elif isinstance(value, list):
            if len(value) > _MAX_PLAIN_WIDTH:
                return False
            left += value
        elif isinstance(value, str):
            num_characters += len(value)
        if num_values + len(left) > _MAX_PLAIN_VALUES or num_characters > _MAX_PLAIN_CHARACTERS:
            return False
    return True


def _is_small_multiple(multiple: float) -> bool:
    """Multiples are matched digit by digit, so the cost is the number of remainders."""
    return math.isfinite(multiple) and float(multiple).is_integer() and 0 < multiple <= _MAX_PLAIN_MULTIPLE


def vet(definition: str, special_tokens: Sequence[str]) -> None:
    """Compile a grammar, and wait. Raises `InvalidParameter` if it is wrong or exceeds the limits."""
    command = [sys.executable, "-P", "-m", __name__]
    asked = msgspec.json.encode(GrammarSource(definition, special_tokens))
    try:
        done = subprocess.run(command, input=asked, capture_output=True, timeout=_WALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise InvalidParameter(_TOO_COMPLEX) from None
    except OSError as error:
        raise InvalidParameter(f"the grammar cannot be checked now: {error}") from error
    if done.returncode:
        raise InvalidParameter(_TOO_COMPLEX)
    sentence = done.stdout.decode(errors="replace").strip()
    if sentence:
        raise InvalidParameter(f"the grammar cannot be compiled: {sentence}")


def allows_no_answer(error: str) -> bool:
    """Whether the library's error says that the grammar allows neither another token nor an end."""
    return error.startswith(_NO_ANSWER)


def reason(error: str) -> str:
    """The library's error as one line of limited length, without its drawings of the position."""
    if allows_no_answer(error):
        return "it allows no answer"
    lines = [line.strip() for line in error[:_MAX_ERROR_CHARACTERS].splitlines()]
    words = " ".join(line for line in lines if line.strip("^- ") and " | " not in line and not line.startswith("<"))
    return words if len(words) <= _REASON_CHARACTERS else words[: _REASON_CHARACTERS - 3] + "..."


def limits() -> object:
    """Limits on the time and memory of one answer's grammar, for each step."""
    return llguidance().LLParserLimits(
        max_lexer_states=20_000,  # up to two KiB each
        step_lexer_fuel=100_000,  # about seven milliseconds
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def error_ahead(matcher: LLMatcher) -> str:
    """The library's error, if any, where a grammar leads as long as there is one way only. Uses up `matcher`.

    With more than one way, a dead end is no error: another way may have an end. The library looks far ahead, and may
    reach its limits by that, so no answer should share the memory of `matcher`.
    """
    num_left = _MAX_BEGINNING
    while not matcher.is_error() and not matcher.is_stopped():
        tokens = matcher.compute_ff_tokens()[:num_left]
        if not tokens or not matcher.consume_tokens(tokens):
            break
        num_left -= len(tokens)
        matcher.compute_bitmask()
    return matcher.get_error()


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module = llguidance()
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=GrammarSource)
    tokenizer = module.LLTokenizer(_Bytes(question.special_tokens))
    matcher = module.LLMatcher(tokenizer, question.definition, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    sys.stdout.write(reason(matcher.get_error()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
