"""The tokens of a prompt, asked of an engine that does not compute it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from kvtier.api.engine_connection import EngineConnection
from kvtier.api.engines import Engines, ServedModel
from kvtier.engine.process.messages import (
    INVALID,
    EncodedPrompt,
    Refused,
    TextPrompt,
    Tokenize,
    TokenPrompt,
    encode_part,
)
from kvtier.errors import EngineAway, InvalidParameter
from tests.support.fake_engine import DIE, FakeEngine, fake_engine
from tests.support.waiting import LIMIT_S

_PROMPT = TextPrompt("one two three")


def with_engines(work: Callable[[Engines, ServedModel], Awaitable[None]], *fakes: FakeEngine) -> None:
    async def run() -> None:
        model = ServedModel(["tiny"], [EngineConnection(one.hello.engine, str(one.path)) for one in fakes])
        engines = Engines([model])
        engines.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                while not engines.is_ready:
                    await asyncio.sleep(0.002)
                await work(engines, model)
        finally:
            await engines.close()

    asyncio.run(run())


@pytest.mark.parametrize("prompt", [_PROMPT, EncodedPrompt(msgspec.Raw(encode_part(_PROMPT)), "one")])
def test_a_prompt_has_its_tokens_also_if_it_was_encoded_elsewhere(
    tmp_path: Path, prompt: TextPrompt | EncodedPrompt
) -> None:
    async def work(engines: Engines, model: ServedModel) -> None:
        assert await engines.tokenize(model, prompt) == [0, 1, 2]

    with fake_engine(tmp_path) as engine:
        with_engines(work, engine)
        assert [one.prompt for one in engine.tokenizes] == [_PROMPT]
        assert not engine.submits


def test_what_is_wrong_with_a_prompt_is_raised(tmp_path: Path) -> None:
    async def work(engines: Engines, model: ServedModel) -> None:
        with pytest.raises(InvalidParameter, match="has no tokenizer"):
            await engines.tokenize(model, _PROMPT)

    with fake_engine(tmp_path) as engine:
        engine.tokenizing = lambda asked: Refused(asked.number, INVALID, "the model has no tokenizer")
        with_engines(work, engine)


def test_another_engine_is_asked_when_one_dies(tmp_path: Path) -> None:
    async def work(engines: Engines, model: ServedModel) -> None:
        assert await engines.tokenize(model, _PROMPT) == [0, 1, 2]
        with pytest.raises(EngineAway):
            await model.connections[0].tokenize(TokenPrompt([1]))

    with fake_engine(tmp_path, name="a") as dying, fake_engine(tmp_path, name="b") as other:

        def die(asked: Tokenize) -> object:
            return DIE

        dying.tokenizing = die  # type: ignore[assignment]
        with_engines(work, dying, other)
        assert dying.tokenizes
        assert other.tokenizes
