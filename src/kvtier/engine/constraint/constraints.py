"""The requests whose answers follow grammars, and which tokens each of them may have next. The engine's thread owns it.

A grammar advances by a token as soon as the host knows it, which may be before the request receives that token: the
next step's tokens are sampled in between. The matchers of one step run in parallel on the library's threads, without
Python's lock. Those of one copy of a grammar take turns (`compiled`), so they are handed over next to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.engine.constraint.compiled import CompiledGrammar, GrammarCopy, num_mask_threads
from kvtier.engine.constraint.library import llguidance
from kvtier.engine.constraint.mask_thread import MaskThread
from kvtier.engine.constraint.vetting import reason
from kvtier.engine.grammar import Grammar
from kvtier.engine.schedule.request import Request
from kvtier.errors import AnswerFailed

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_FEW_TOKENS = 8
"""Waking threads takes as long as advancing this many matchers."""
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The rows of a step that sample under a grammar, and the tokens that each may have.

    Bit `t % 32` of `words[i, t // 32]` says whether row `rows[i]` may have token `t`.
    """

    rows: npt.NDArray[np.int64]
    words: npt.NDArray[np.int32]


MakeMasks = Callable[[int, int], TokenMasks]
"""Returns uninitialised memory for masks, given the number of rows and of words in each."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """Tokens that end a text: bits `bits[i]` in word `places[i]` of a mask."""

    places: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int32]


@dataclass(slots=True)
class _Constraint:
    """One answer's position in its grammar. The matcher has consumed `num_taken` of its tokens."""

    compiled: CompiledGrammar
    copy: GrammarCopy | None = None
    matcher: LLMatcher | None = None
    num_taken: int = 0
    end: int | None = None
    """The answer is complete with this many tokens: the grammar allows no more."""
    failed_at: int | None = None
    failure: str = ""

    @property
    def is_over(self) -> bool:
        return self.end is not None or self.failed_at is not None

    def leave(self) -> None:
        """Return its copy of the grammar."""
        if self.copy is not None:
            self.copy.give_back()
            self.copy = None


class Constraints:
    """Constrains each request between its `add` and its `forget`."""

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int], drop: Callable[[Grammar], None]) -> None:
        """`drop` is called with a grammar that failed, so that the next request compiles it anew."""
        self._vocab_size = vocab_size
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._drop = drop
        self._constraints: dict[Request, _Constraint] = {}
        self._executor: LLExecutor | None = None
        self._thread = MaskThread()
        self._ends: _Ends | None = None

    def __bool__(self) -> bool:
        return bool(self._constraints)

    def add(self, request: Request, compiled: CompiledGrammar) -> None:
        self._constraints[request] = _Constraint(compiled)

    def forget(self, request: Request) -> None:
        """After the last request, the thread ends too."""
        constraint = self._constraints.pop(request, None)
        if constraint is None:
            return
        constraint.leave()
        if not self._constraints:
            self._thread.close()

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def rewind(self, request: Request) -> None:
        """Return to the tokens that the request has."""
        constraint = self._constraints.get(request)
        if constraint is not None:
            constraint.leave()
            self._constraints[request] = _Constraint(constraint.compiled)

    def waits_for_tokens(self, requests: Iterable[Request]) -> bool:
        """Whether tokens of one of `requests`, which are about to sample, are still on the device.

        `num_in_flight` of each counts the token that it is about to sample.
        """
        found = self._constraints
        return any(request.num_in_flight > 1 for request in requests if request in found)

    def advance(self, sampled: Iterable[tuple[Request, int]]) -> None:
        """Consume sampled tokens, the next of their requests."""
        moved = []
        for request, token_id in sampled:
            constraint = self._constraints.get(request)
            if constraint is not None and not constraint.is_over:
                moved.append((request, constraint, self._matcher(request, constraint), token_id))
        if not moved:
            return
        moved.sort(key=lambda one: id(one[1].copy))
        if len(moved) <= _FEW_TOKENS:
            taken = [matcher.consume_token(token_id) for _, _, matcher, token_id in moved]
        else:
            taken = self._get_executor().consume_token_par([(matcher, token_id) for _, _, matcher, token_id in moved])
        for (request, constraint, matcher, _), is_taken in zip(moved, taken, strict=True):
            constraint.num_taken += 1
            if not is_taken:
                self._note_failure(request, constraint, matcher, constraint.num_taken)
            elif matcher.is_stopped():
                constraint.end = constraint.num_taken

    def masks(self, requests: Sequence[Request], make: MakeMasks, meanwhile: Callable[[], None]) -> TokenMasks | None:
        """The tokens that the rows of `requests` may have; None if none has a grammar. Earlier tokens must be known.

        The library's threads write the masks into memory from `make`. Meanwhile this thread calls `meanwhile`, which
        may forget requests.
        """
        self._thread.drain()
        rows: list[int] = []
        moving = []
        for row, request in enumerate(requests):
            constraint = self._constraints.get(request)
            if constraint is None:
                continue
            matcher = self._matcher(request, constraint)
            if not constraint.is_over:
                num_known = request.num_tokens - request.prompt_tokens - 1
                assert constraint.num_taken == num_known, "a grammar has not seen all tokens"
                moving.append((matcher, len(rows), request, constraint))
                rows.append(row)
        if not rows:
            meanwhile()
            return None
        masks = make(len(rows), moving[0][3].compiled.num_words)
        masks.rows[:] = rows
        words = masks.words
        moving.sort(key=lambda one: id(one[3].copy))
        pairs = [(matcher, place) for matcher, place, _, _ in moving]
        where = (words.ctypes.data, 4 * words.shape[1], len(words))
        executor = self._get_executor()
        self._thread.begin(lambda: executor.unsafe_compute_mask_ptr(pairs, *where))
        try:
            meanwhile()
        finally:
            self._thread.wait()
        ends = self._get_ends(words.shape[1])
        has_end = np.any(words[:, ends.places] & ends.bits, axis=1)
        for matcher, place, request, constraint in moving:
            if matcher.is_error():
                self._note_failure(request, constraint, matcher, constraint.num_taken + 1)
                words[place] = -1
            elif has_end[place] and self._is_kept_from_ending(request, constraint):
                words[place, ends.places] &= ~ends.bits
                if not words[place].any():
                    constraint.end = constraint.num_taken
                    words[place] = -1  # what it samples is dropped
        return masks

    def end_of(self, request: Request) -> int | None:
        """The number of tokens of the complete answer, once that is known.

        Raises `AnswerFailed` if the grammar failed before the next token.
        """
        constraint = self._constraints.get(request)
        if constraint is None:
            return None
        if constraint.failed_at is not None and request.num_outputs + 1 >= constraint.failed_at:
            raise AnswerFailed(f"the grammar could not be followed: {constraint.failure}")
        return constraint.end

    def _matcher(self, request: Request, constraint: _Constraint) -> LLMatcher:
        """The matcher. A new one, at first or after a rewind, consumes the answer so far."""
        if constraint.matcher is None:
            constraint.copy = constraint.compiled.take_copy()
            constraint.matcher = constraint.copy.matcher()
            tokens = request.output_tokens
            constraint.num_taken = len(tokens)
            if not constraint.matcher.consume_tokens(tokens):
                self._note_failure(request, constraint, constraint.matcher, len(tokens) + 1)
            elif constraint.matcher.is_stopped():
                constraint.end = len(tokens)
        return constraint.matcher

    def _note_failure(self, request: Request, constraint: _Constraint, matcher: LLMatcher, failed_at: int) -> None:
        constraint.failed_at = failed_at
        constraint.failure = reason(matcher.get_error())
        if request.params.grammar is not None:
            self._drop(request.params.grammar)

    def _is_kept_from_ending(self, request: Request, constraint: _Constraint) -> bool:
        """Whether the answer must not sample an end of text now; a complete answer then ends without one."""
        params = request.params
        return params.ignore_eos or not self._eos_token_ids or constraint.num_taken < params.min_tokens

    def _get_ends(self, num_words: int) -> _Ends:
        """Includes tokens beyond the vocabulary: the library adds one there for a model without an end of text."""
        if self._ends is None:
            bits = np.zeros(num_words * _WORD_BITS, np.uint8)
            bits[self._vocab_size :] = 1
            bits[self._eos_token_ids] = 1
            words = np.packbits(bits, bitorder="little").view(np.int32)
            places = np.flatnonzero(words)
            self._ends = _Ends(places, words[places])
        return self._ends

    def _get_executor(self) -> LLExecutor:
        if self._executor is None:
            self._executor = llguidance().LLExecutor(num_mask_threads())
        return self._executor
