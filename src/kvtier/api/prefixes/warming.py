"""How a prefix gets into the cache: what is absent is computed piece by piece, while the model has nothing else to do.

A piece is the prompt up to a place; all before it is cached by then. Traffic comes first: the next piece waits until
the model's engines are idle, but no longer than `patience_s`, so a busy model is warmed too, slowly. Pieces grow as
long as they take less than `piece_s`: a request that comes in the middle of one waits no longer than that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec

from kvtier.api.engine_connection import Question
from kvtier.api.engines import Engines, ServedModel
from kvtier.engine.process.messages import ChatPrompt, TokenPrompt, encode_part
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import AnswerFailed, EngineAway, RequestError

_CLIENT = "warm"
_LOOK_S = 0.02
_COMPLETE = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Pace:
    """How warming gives way to traffic."""

    patience_s: float = 1.0
    piece_s: float = 0.25
    first_tokens: int = 256
    most_tokens: int = 8192


DEFAULT_PACE = Pace()


async def common_tokens(engines: Engines, model: ServedModel, prompts: Sequence[ChatPrompt]) -> list[int]:
    """The tokens that all of `prompts` begin with: chats that differ in their questions alone."""
    common: list[int] | None = None
    for prompt in prompts:
        tokens = await engines.tokenize(model, prompt)
        common = tokens if common is None else common[: _num_common(common, tokens)]
    return common or []


def _num_common(ours: list[int], theirs: list[int]) -> int:
    """By halves: whole lists are compared faster than tokens one by one."""
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Warming:
    """One prefix on its way into the cache. `tokens` are those of its full blocks."""

    def __init__(self, engines: Engines, model: ServedModel, tokens: list[int], salt: str, pace: Pace) -> None:
        self._engines = engines
        self._model = model
        self._tokens = tokens
        self._salt = salt
        self._pace = pace
        self._params = msgspec.Raw(encode_part(SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))

    async def compute(self, first: int, request_id: str) -> AsyncGenerator[int, None]:
        """Compute tokens from `first` on; yields how many are done. Raises as a request for an answer does."""
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
        """False when the engines have had requests all the time."""
        deadline = time.monotonic() + self._pace.patience_s
        while any(connection.num_requests for connection in self._model.connections):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def _compute_piece(self, end: int, request_id: str) -> None:
        prompt = TokenPrompt(self._tokens[:end])
        question = Question(prompt, self._params, 1, request_id, self._salt, _CLIENT, warms=True)
        answers = await self._engines.submit(self._model, question)
        try:
            async for _, piece in answers.pieces():
                if piece.completion is not None and piece.completion.finish_reason not in _COMPLETE:
                    raise AnswerFailed("the engine failed at these documents; its log has more")
        finally:
            answers.close()


def check_tokens(tokens: Sequence[int], model: ServedModel) -> int:
    """How many full blocks they are. Raises a `RequestError` for too few or many, `EngineAway` without an engine."""
    hello = model.hello
    if hello is None:
        raise EngineAway(f"the model {model.name} is starting")
    if len(tokens) < hello.block_tokens:
        raise RequestError(
            f"the documents have {len(tokens)} tokens, and a block has {hello.block_tokens}: there is nothing to keep"
        )
    if len(tokens) >= hello.max_model_len:
        most = hello.max_model_len - 1
        raise RequestError(f"the documents have {len(tokens)} tokens, and {model.name} takes prompts of {most} at most")
    return len(tokens) // hello.block_tokens
