"""Puts a prefix into the cache: computes absent blocks piece by piece, while the model is idle.

Each piece is a request for a longer beginning of the prompt, all of which but the new tokens is cached by then.
Traffic has priority: the next piece waits until the model's engines are idle, but no longer than `patience_s`, so
even a busy model is warmed, slowly. Pieces grow while they take less than `piece_s`, which limits the delay of a
request that arrives during a piece.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec

from kvtier.api.engine_connection import PromptRequest
from kvtier.api.engines import Engines, ServedModel
from kvtier.engine.process.messages import ChatPrompt, TokenPrompt, encode_part
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import AnswerFailed, EngineAway, RequestError

_CLIENT = "warm"
_LOOK_S = 0.02
_COMPLETE = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Pace:
    """How warming yields to traffic."""

    patience_s: float = 1.0
    piece_s: float = 0.25
    first_tokens: int = 256
    most_tokens: int = 8192


DEFAULT_PACE = Pace()


async def common_tokens(engines: Engines, model: ServedModel, prompts: Sequence[ChatPrompt]) -> list[int]:
    """The common beginning of `prompts`, which are chats that differ in their questions alone, as tokens."""
    common: list[int] | None = None
    for prompt in prompts:
        tokens = await engines.tokenize(model, prompt)
        common = tokens if common is None else common[: _num_common(common, tokens)]
    return common or []


def _num_common(ours: list[int], theirs: list[int]) -> int:
    """The length of the common beginning. A binary search: slices are compared faster than single tokens."""
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Warming:
    """The warming of one prefix. `tokens` are those of its full blocks."""

    def __init__(self, engines: Engines, model: ServedModel, tokens: list[int], salt: str, pace: Pace) -> None:
        self._engines = engines
        self._model = model
        self._tokens = tokens
        self._salt = salt
        self._pace = pace
        self._params = msgspec.Raw(encode_part(SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    async def compute(self, first: int, request_id: str) -> AsyncGenerator[int, None]:
        """Compute the tokens from `first` on; yields the number of tokens done. Raises as any request."""
        done, step = first, self._pace.first_tokens
        number = 0
        while done < len(self._tokens):
            is_idle = await self._wait_for_idleness()
            end = min(len(self._tokens), done + (step if is_idle else self._pace.first_tokens))
            began_at = time.monotonic()
            await self._compute_piece(end, f"{request_id}-{number}")
            number += 1
            took_s = time.monotonic() - began_at
            if is_idle and end - done == step:
                step = self._next_step(step, took_s)
            done = end
            yield done

    def _next_step(self, step: int, took_s: float) -> int:
        if took_s > 2 * self._pace.piece_s:
            return max(self._pace.first_tokens, step // 2)
        return min(self._pace.most_tokens, 2 * step) if took_s < self._pace.piece_s / 2 else step

    async def _wait_for_idleness(self) -> bool:
        """Wait until the engines are idle; False if they were busy until the deadline."""
        deadline = time.monotonic() + self._pace.patience_s
        while any(connection.num_requests for connection in self._model.connections):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def _compute_piece(self, end: int, request_id: str) -> None:
        prompt = TokenPrompt(self._tokens[:end])
        question = PromptRequest(prompt, self._params, 1, request_id, self._salt, _CLIENT, warms=True)
        answers = await self._engines.submit(self._model, question)
        try:
            async for _, piece in answers.pieces():
                if piece.completion is not None and piece.completion.finish_reason not in _COMPLETE:
                    raise AnswerFailed("the engine failed on these documents: see its log")
        finally:
            answers.close()


def check_tokens(tokens: Sequence[int], model: ServedModel) -> int:
    """The number of full blocks. Raises `RequestError` for too few or many tokens, `EngineAway` without an engine."""
    hello = model.hello
    if hello is None:
        raise EngineAway(f"the model {model.name} is starting")
    if len(tokens) < hello.block_tokens:
        raise RequestError(
            f"the documents have {len(tokens)} tokens, less than a block of {hello.block_tokens}: nothing can be cached"
        )
    if len(tokens) >= hello.max_model_len:
        most = hello.max_model_len - 1
        raise RequestError(f"the documents have {len(tokens)} tokens, but {model.name} takes prompts of at most {most}")
    return len(tokens) // hello.block_tokens
