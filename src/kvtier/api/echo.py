"""Prompts before their answers, as pieces like any other: what `echo` asks for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from kvtier.engine.answer import StreamPiece
from kvtier.engine.prompt_token import PromptToken

PIECE_TOKENS = 64
"""Tokens of a prompt that are shaped in one go: others come between."""

_Numbered = tuple[int, StreamPiece]


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts of one request. Choices count through all answers of all of them, `num_answers` to each.

    `num_tokens` are those of the prompts if logprobs of them are shown, and empty otherwise.
    """

    texts: Sequence[str]
    num_answers: int
    num_tokens: Sequence[int] = ()

    async def before(self, pieces: AsyncIterator[_Numbered]) -> AsyncGenerator[_Numbered, None]:
        """`pieces`, each answer's behind its prompt."""
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
            if num_left[number]:  # another answer to the same prompt may be faster than the one that brings the scores
                held.setdefault(number, []).append((choice, piece))
                continue
            for waiting in held.pop(number, []):
                yield waiting
            yield choice, piece

    def _scored(self, number: int, tokens: Sequence[PromptToken]) -> Iterator[_Numbered]:
        """Every answer shows them."""
        for part in parts_of(tokens):
            token_ids, logprobs = [token.token_id for token in part], [token.logprobs for token in part]
            for index in range(self.num_answers):
                yield number * self.num_answers + index, StreamPiece(index, token_ids, "", logprobs)


def parts_of(tokens: Sequence[PromptToken]) -> Iterator[Sequence[PromptToken]]:
    return (tokens[first : first + PIECE_TOKENS] for first in range(0, len(tokens), PIECE_TOKENS))
