"""For `echo`: puts prompts before their answers, as pieces of the answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from kvtier.engine.answer import StreamPiece
from kvtier.engine.prompt_token import PromptToken

PIECE_TOKENS = 64
"""Tokens of a prompt in one piece: between pieces the event loop serves other requests."""

_Numbered = tuple[int, StreamPiece]


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts of one request. Choices number the answers to all prompts, `num_answers` for each.

    `num_tokens` has the number of tokens of each prompt if their log-probabilities are shown; it is empty otherwise.
    """

    texts: Sequence[str]
    num_answers: int
    num_tokens: Sequence[int] = ()

    async def before(self, pieces: AsyncIterator[_Numbered]) -> AsyncGenerator[_Numbered, None]:
        """`pieces`, with each answer's pieces after those of its prompt."""
        for choice in range(len(self.texts) * self.num_answers):
            yield choice, StreamPiece(choice % self.num_answers, [], self.texts[choice // self.num_answers])
        num_left = list(self.num_tokens)
        held: dict[int, list[_Numbered]] = {}
        async for choice, piece in pieces:
            number = choice // self.num_answers
            if not self.num_tokens:
                yield choice, piece
                continue
            for scored in self._scored(number, piece.prompt or []):
                yield scored
            num_left[number] -= len(piece.prompt or [])
            if num_left[number]:  # another answer to the prompt may be faster than the one with the prompt's scores
                held.setdefault(number, []).append((choice, piece))
                continue
            for waiting in held.pop(number, []):
                yield waiting
            yield choice, piece

    def _scored(self, number: int, tokens: Sequence[PromptToken]) -> Iterator[_Numbered]:
        """The prompt's pieces, repeated for each of its answers."""
        for part in parts_of(tokens):
            token_ids, logprobs = [token.token_id for token in part], [token.logprobs for token in part]
            for index in range(self.num_answers):
                yield number * self.num_answers + index, StreamPiece(index, token_ids, "", logprobs)


def parts_of(tokens: Sequence[PromptToken]) -> Iterator[Sequence[PromptToken]]:
    return (tokens[first : first + PIECE_TOKENS] for first in range(0, len(tokens), PIECE_TOKENS))
