"""The requests whose answers follow grammars, and which tokens each of them may have next. The engine's thread owns it.

A grammar advances by a token as soon as the host knows it, which may be before the request receives that token: the
next step's tokens are sampled in between. The matchers of one step run in parallel on the library's threads, without
Python's lock, in one call. Those of one copy of a grammar take turns (`compiled`), so they are handed over next to each
other. What a step hands over is kept for the next one, which mostly has the same requests.
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
from kvtier.engine.constraint.vetting import allows_no_answer, reason
from kvtier.engine.grammar import DEAD_END, Grammar
from kvtier.engine.schedule.request import Request
from kvtier.errors import AnswerFailed, InvalidGrammar

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


@dataclass(slots=True, eq=False)
class _Constraint:
    """One answer's position in its grammar. The matcher has consumed `num_taken` of its tokens."""

    request: Request
    compiled: CompiledGrammar
    copy: GrammarCopy | None = None
    matcher: LLMatcher | None = None
    num_taken: int = 0
    end: int | None = None
    """The answer is complete with this many tokens: the grammar allows no more."""
    failed_at: int | None = None
    failure: str = ""
    is_dead_end: bool = False
    """It failed because the grammar allows neither another token nor an end."""
    is_over: bool = False
    """It ended or failed."""

    def finish(self) -> None:
        """The answer is complete with the tokens so far."""
        self.end = self.num_taken
        self.is_over = True

    def leave(self) -> None:
        """Return its copy of the grammar."""
        if self.copy is not None:
            self.copy.give_back()
            self.copy = None


@dataclass(frozen=True, slots=True)
class _Step:
    """The constrained rows among `requests`, in the order in which their matchers are handed over."""

    requests: list[Request]
    rows: npt.NDArray[np.int64]
    """The rows, in order; a mask's place is that of its row."""
    pairs: list[tuple[LLMatcher, int]]
    """Each matcher, and the place of its mask."""
    constraints: list[_Constraint]


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
        self._step: _Step | None = None
        """The last step's. None once one of its constraints is over, or another one began."""

    def __bool__(self) -> bool:
        return bool(self._constraints)

    def add(self, request: Request, compiled: CompiledGrammar) -> None:
        self._constraints[request] = _Constraint(request, compiled)
        self._step = None

    def forget(self, request: Request) -> None:
        """After the last request, the thread ends too."""
        constraint = self._constraints.pop(request, None)
        if constraint is None:
            return
        constraint.leave()
        self._step = None
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
            self._constraints[request] = _Constraint(request, constraint.compiled)
            self._step = None

    def waits_for_tokens(self, requests: Iterable[Request]) -> bool:
        """Whether tokens of one of `requests`, which are about to sample, are still on the device.

        `num_in_flight` of each counts the token that it is about to sample.
        """
        found = self._constraints
        return any(request.num_in_flight > 1 for request in requests if request in found)

    def advance(self, sampled: Iterable[tuple[Request, int]]) -> None:
        """Consume sampled tokens, the next of their requests."""
        found = self._constraints
        moved = [
            (self._matcher(one), token_id, one)
            for request, token_id in sampled
            if (one := found.get(request)) is not None and not one.is_over
        ]
        if len(moved) <= _FEW_TOKENS:
            taken = [matcher.consume_token(token_id) for matcher, token_id, _ in moved]
        else:
            moved.sort(key=lambda one: id(one[2].copy))
            taken = self._get_executor().consume_token_par([(matcher, token_id) for matcher, token_id, _ in moved])
        for (matcher, _, constraint), is_taken in zip(moved, taken, strict=True):
            constraint.num_taken += 1
            if not is_taken:
                self._note_failure(constraint, matcher, constraint.num_taken)
            elif matcher.is_stopped():
                constraint.finish()
                self._step = None

    def masks(self, requests: Sequence[Request], make: MakeMasks, meanwhile: Callable[[], None]) -> TokenMasks | None:
        """The tokens that the rows of `requests` may have; None if none has a grammar. Earlier tokens must be known.

        They are written into memory from `make`, by the library's threads if there are several. Meanwhile this thread
        calls `meanwhile`, which may forget requests.
        """
        self._thread.drain()
        step = self._step_of(requests)
        if not step.pairs:
            meanwhile()
            return None
        masks = make(len(step.pairs), step.constraints[0].compiled.num_words)
        masks.rows[:] = step.rows
        words = masks.words
        if len(step.pairs) == 1:
            # To wake another thread and wait for it takes longer than most masks.
            step.pairs[0][0].unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            meanwhile()
        else:
            where = (words.ctypes.data, 4 * words.shape[1], len(words))
            executor = self._get_executor()
            self._thread.begin(lambda: executor.unsafe_compute_mask_ptr(step.pairs, *where))
            try:
                meanwhile()
            finally:
                self._thread.wait()
        self._check(step, words)
        return masks

    def _check(self, step: _Step, words: npt.NDArray[np.int32]) -> None:
        """Note the matchers that failed, and take away ends of text where an answer must not end."""
        ends = self._get_ends(words.shape[1])
        has_end = np.any(words[:, ends.places] & ends.bits, axis=1).tolist()
        for (matcher, place), constraint in zip(step.pairs, step.constraints, strict=True):
            if matcher.is_error():
                self._note_failure(constraint, matcher, constraint.num_taken + 1)
                words[place] = -1
            elif has_end[place] and self._is_kept_from_ending(constraint):
                words[place, ends.places] &= ~ends.bits
                if not words[place].any():
                    constraint.finish()
                    self._step = None
                    words[place] = -1  # what it samples is dropped

    def _step_of(self, requests: Sequence[Request]) -> _Step:
        """As last time if nothing has changed. The matchers of one copy of a grammar are next to each other."""
        step = self._step
        if step is None or step.requests != requests:
            found = [(row, self._constraints[one]) for row, one in enumerate(requests) if one in self._constraints]
            moving = [(self._matcher(one), row, one) for row, one in found]
            moving = [one for one in moving if not one[2].is_over]  # a new matcher may end with the answer so far
            places = {row: place for place, (_, row, _) in enumerate(moving)}
            moving.sort(key=lambda one: id(one[2].copy))
            step = self._step = _Step(
                list(requests),
                np.array(list(places), np.int64),
                [(matcher, places[row]) for matcher, row, _ in moving],
                [constraint for _, _, constraint in moving],
            )
        for constraint in step.constraints:
            request = constraint.request
            num_known = request.num_tokens - request.prompt_tokens - 1
            assert constraint.num_taken == num_known, "a grammar has not seen all tokens"
        return step

    def end_of(self, request: Request) -> int | None:
        """The number of tokens of the complete answer, once that is known.

        Before the next token, raises `InvalidGrammar` if the grammar allows none, and `AnswerFailed` if it failed.
        """
        constraint = self._constraints.get(request)
        if constraint is None:
            return None
        if constraint.failed_at is not None and request.num_outputs + 1 >= constraint.failed_at:
            if constraint.is_dead_end:
                raise InvalidGrammar(DEAD_END)
            raise AnswerFailed(f"the grammar could not be followed: {constraint.failure}")
        return constraint.end

    def _matcher(self, constraint: _Constraint) -> LLMatcher:
        """The matcher. A new one, at first or after a rewind, consumes the answer so far."""
        if constraint.matcher is None:
            constraint.copy = constraint.compiled.take_copy()
            constraint.matcher = constraint.copy.matcher()
            tokens = constraint.request.output_tokens
            constraint.num_taken = len(tokens)
            if not constraint.matcher.consume_tokens(tokens):
                self._note_failure(constraint, constraint.matcher, len(tokens) + 1)
            elif constraint.matcher.is_stopped():
                constraint.finish()
        return constraint.matcher

    def _note_failure(self, constraint: _Constraint, matcher: LLMatcher, failed_at: int) -> None:
        constraint.failed_at = failed_at
        error = matcher.get_error()
        constraint.failure = reason(error)
        constraint.is_dead_end = allows_no_answer(error)
        constraint.is_over = True
        self._step = None
        grammar = constraint.request.params.grammar
        if grammar is not None:
            self._drop(grammar)

    def _is_kept_from_ending(self, constraint: _Constraint) -> bool:
        """Whether the answer must not sample an end of text now; a complete answer then ends without one."""
        params = constraint.request.params
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
