"""Prompts come before their answers, whichever answer is the first to come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvtier.api.echo import PIECE_TOKENS, Echo
from kvtier.engine.answer import StreamPiece
from kvtier.engine.prompt_token import PromptToken

Numbered = tuple[int, StreamPiece]


def scored(*token_ids: int) -> list[PromptToken]:
    return [PromptToken(token_id, 1, {token_id: -0.5}) for token_id in token_ids]


def echoed(echo: Echo, pieces: Sequence[Numbered]) -> list[Numbered]:
    async def come() -> AsyncIterator[Numbered]:
        for numbered in pieces:
            yield numbered

    async def run() -> list[Numbered]:
        return [numbered async for numbered in echo.before(come())]

    return asyncio.run(run())


def test_an_answer_that_overtakes_its_prompts_scores_waits_for_them() -> None:
    early = StreamPiece(1, [9], "b", [{9: -1.0}])
    last = StreamPiece(0, [8], "a", [{8: -1.0}], prompt=scored(3))
    other = StreamPiece(0, [7], "c", [{7: -1.0}], prompt=scored(4))
    pieces = [(0, StreamPiece(0, [], "", prompt=scored(1, 2))), (1, early), (2, other), (0, last)]

    found = echoed(Echo(["x", "y"], 2, [3, 1]), pieces)

    for choice, text, token_ids in ((0, "xa", [1, 2, 3, 8]), (1, "xb", [1, 2, 3, 9]), (2, "yc", [4, 7]), (3, "y", [4])):
        own = [piece for number, piece in found if number == choice]
        assert "".join(piece.text for piece in own) == text
        assert [token_id for piece in own for token_id in piece.token_ids] == token_ids


def test_without_logprobs_the_text_comes_first_and_nothing_waits() -> None:
    piece = StreamPiece(0, [8], "a")

    assert echoed(Echo(["x"], 1), [(0, piece)]) == [(0, StreamPiece(0, [], "x")), (0, piece)]


def test_a_long_prompt_comes_in_small_pieces() -> None:
    count = 3 * PIECE_TOKENS + 1
    piece = StreamPiece(0, [8], "a", [{8: -1.0}], prompt=scored(*range(count)))

    found = echoed(Echo(["x"], 1, [count]), [(0, piece)])

    assert [len(one.token_ids) for _, one in found] == [0, *[PIECE_TOKENS] * 3, 1, 1]
