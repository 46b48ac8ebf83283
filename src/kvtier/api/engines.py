"""The models that are served, and the engines behind each: which of them gets a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvtier.api.body_messages import ModelSnapshot
from kvtier.api.config import AUTO
from kvtier.api.engine_connection import Answers, EngineConnection, Question
from kvtier.engine.process.messages import ChatPrompt, EncodedPrompt, Hello, Prompt, TextPrompt, Tokenized
from kvtier.errors import EngineAway, EngineStopped, UnknownModel

_Model = TypeVar("_Model", bound="KnownModel")
_Reply = TypeVar("_Reply")

_AFFINITY_SLACK = 4
"""An engine with this many more requests than the idlest one is passed over, even for a prompt it knows."""

_AFFINITY_CHARACTERS = 2048
_AFFINITY_TOKENS = 512
_SHOWN_CHARACTERS = 60


class KnownModel(Protocol):
    """A model as bodies name it, wherever they are read. As `ServedModel`."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, object]: ...

    @property
    def hello(self) -> Hello | None: ...

    @property
    def tool_format(self) -> str: ...

    @property
    def reasoning_format(self) -> str: ...


class ModelCatalog(Protocol):
    @property
    def models(self) -> Sequence[KnownModel]: ...

    @property
    def known(self) -> str:
        """The names of all models, also of those that other engines run, as a sentence lists them."""

    def find(self, name: str) -> KnownModel:
        """Raises `UnknownModel` with the names there are."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model by the names that clients call it, the first being its own. Lists show those in `listed`, or all.

    `default_options` are fields of `SamplingParams` for requests that do not give them. `tool_format` and
    `reasoning_format` are how it writes calls and thoughts, where the deployment's file says so.
    """

    names: Sequence[str]
    connections: Sequence[EngineConnection]
    default_options: Mapping[str, object] = field(default_factory=dict)
    listed: Sequence[str] = ()
    tool_format: str = AUTO
    reasoning_format: str = AUTO

    @property
    def listed_names(self) -> Sequence[str]:
        return self.listed or self.names

    @property
    def options(self) -> dict[str, object]:
        """For fields that a request does not give: what the deployment says, else what the model's makers say."""
        hello = self.hello
        return {**({} if hello is None else hello.default_options), **self.default_options}

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def hello(self) -> Hello | None:
        """What its engines are; None while none of them has connected."""
        return next((connection.hello for connection in self.connections if connection.hello is not None), None)


class Engines:
    """All of them. `start` in the event loop, `close` there too. `others` are names of models that vLLM runs."""

    def __init__(self, models: Sequence[ServedModel], others: Sequence[str] = ()) -> None:
        self.models = models
        self.known = ", ".join([*(model.name for model in models), *others])
        self._by_name = {name: model for model in models for name in model.names}

    @property
    def connections(self) -> list[EngineConnection]:
        return [connection for model in self.models for connection in model.connections]

    @property
    def is_ready(self) -> bool:
        return all(connection.hello is not None and not connection.is_hung for connection in self.connections)

    def start(self) -> None:
        for connection in self.connections:
            connection.start()

    async def close(self) -> None:
        for connection in self.connections:
            await connection.close()

    def break_off(self, sentence: str) -> None:
        """All that is under way ends with an error that says so."""
        for connection in self.connections:
            connection.break_off(sentence)

    def find(self, name: str) -> ServedModel:
        """Raises `UnknownModel` with the names there are."""
        found = self._by_name.get(name)
        if found is None:
            raise unknown_model(name, self.known)
        return found

    def snapshot(self) -> list[ModelSnapshot]:
        """What another process needs to know to read a body."""
        return [
            ModelSnapshot(
                list(model.names),
                model.options,
                model.hello,
                tool_format=model.tool_format,
                reasoning_format=model.reasoning_format,
            )
            for model in self.models
        ]

    async def submit(self, model: ServedModel, question: Question) -> Answers:
        """Hand a prompt to one of the model's engines. Raises as `EngineConnection.submit` does."""
        error = _nobody_there(model)
        left = list(model.connections)
        while there := _in_order(left, question):
            try:
                return await there[0].submit(question)
            except EngineStopped as stopped:  # before it took the prompt: another one may, also one that came meanwhile
                left.remove(there[0])
                error = stopped
        raise error

    async def tokenize(self, model: ServedModel, prompt: Prompt | EncodedPrompt) -> list[int]:
        """The tokens of a prompt, by any of the model's engines. Raises as `EngineConnection.tokenize` does."""
        return (await self.tokenized(model, prompt, with_texts=False)).token_ids

    async def tokenized(self, model: ServedModel, prompt: Prompt | EncodedPrompt, *, with_texts: bool) -> Tokenized:
        """As `tokenize`, with the tokens as the vocabulary has them, if asked for."""
        return await _first(model, lambda connection: connection.tokenize(prompt, with_texts=with_texts))

    async def detokenize(self, model: ServedModel, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens, by any of the model's engines. Raises as `EngineConnection.detokenize` does."""
        return await _first(
            model, lambda connection: connection.detokenize(token_ids, skip_special_tokens=skip_special_tokens)
        )


async def _first(model: ServedModel, ask: Callable[[EngineConnection], Awaitable[_Reply]]) -> _Reply:
    """What the idlest of a model's engines says, or another one, if that one stops before it has answered."""
    error = _nobody_there(model)
    for connection in sorted(_there(model.connections), key=lambda one: one.num_requests):
        try:
            return await ask(connection)
        except EngineStopped as stopped:
            error = stopped
    raise error


def find_model(models: Sequence[_Model], name: str) -> _Model:
    """Raises `UnknownModel` with the names there are."""
    for model in models:
        if name in model.names:
            return model
    raise unknown_model(name, ", ".join(one.name for one in models))


def unknown_model(name: str, known: str) -> UnknownModel:
    shown = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..."
    return UnknownModel(f"the model {shown!r} is not served here; available: {known}")


def _there(connections: Sequence[EngineConnection]) -> list[EngineConnection]:
    return [connection for connection in connections if connection.hello is not None and not connection.is_hung]


def _nobody_there(model: ServedModel) -> EngineStopped:
    is_hung = any(connection.is_hung for connection in model.connections)
    return EngineAway(f"the model {model.name} {'does not answer' if is_hung else 'is starting'}")


def _in_order(connections: Sequence[EngineConnection], question: Question) -> list[EngineConnection]:
    """Those that answer, the best one first: where prompts of the same session, or that begin alike, went.

    Unless it is much busier.
    """
    there = _there(connections)
    if len(there) < 2:
        return there
    idlest = min(connection.num_requests for connection in there)
    kin = f"session {question.session}" if question.session else beginning_of(question.prompt)
    beginning = f"{question.salt}\n{kin}".encode(errors="replace")

    def rank(connection: EngineConnection) -> tuple[bool, int, bytes]:
        is_busy = connection.num_requests > idlest + _AFFINITY_SLACK
        weight = hashlib.sha256(connection.name.encode() + beginning).digest()
        return is_busy, connection.num_requests if is_busy else 0, weight

    return sorted(there, key=rank)


def beginning_of(prompt: Prompt | EncodedPrompt) -> str:
    """Text that prompts which begin alike have in common."""
    if isinstance(prompt, EncodedPrompt):
        return prompt.beginning
    if isinstance(prompt, TextPrompt):
        return prompt.text[:_AFFINITY_CHARACTERS]
    if isinstance(prompt, ChatPrompt):
        first = (f"{one.role}: {one.content[:_AFFINITY_CHARACTERS]}" for one in prompt.messages[:2])
        return "\n".join(first)[:_AFFINITY_CHARACTERS]
    return repr(prompt.token_ids[:_AFFINITY_TOKENS])
