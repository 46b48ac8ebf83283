"""The served models and their engines, and the choice of an engine for a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvtier.api.body_messages import ModelSnapshot
from kvtier.api.config import AUTO
from kvtier.api.engine_connection import Answers, EngineConnection, PromptRequest
from kvtier.engine.process.messages import ChatPrompt, EncodedPrompt, EngineHello, Prompt, TextPrompt, Tokenized
from kvtier.errors import EngineAway, EngineStopped, UnknownModel

_Model = TypeVar("_Model", bound="KnownModel")
_Reply = TypeVar("_Reply")

_AFFINITY_SLACK = 4
"""An engine with this many more requests than the least busy one is passed over, even if it should get the prompt."""

_AFFINITY_CHARACTERS = 2048
_AFFINITY_TOKENS = 512
_SHOWN_CHARACTERS = 60


class KnownModel(Protocol):
    """What readers of bodies need of a model, in this process or another. See `ServedModel`."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, object]: ...

    @property
    def hello(self) -> EngineHello | None: ...

    @property
    def tool_format(self) -> str: ...

    @property
    def reasoning_format(self) -> str: ...


class ModelCatalog(Protocol):
    @property
    def models(self) -> Sequence[KnownModel]: ...

    @property
    def known(self) -> str:
        """The names of all models, including those that vLLM runs, for error sentences."""

    def find(self, name: str) -> KnownModel:
        """Raises `UnknownModel`, which lists the known names."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and its engines. The first of `names` is its main name; lists show the names in `listed`, or all.

    `default_options` are fields of `SamplingParams` for requests without them. `tool_format` and `reasoning_format` are
    the formats of its calls and its reasoning, if the deployment file sets them.
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
        """Defaults for absent fields of requests: the deployment's, then those that come with the model."""
        hello = self.hello
        return {**({} if hello is None else hello.default_options), **self.default_options}

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def hello(self) -> EngineHello | None:
        """The description by the first connected engine; None while none is connected."""
        return next((connection.hello for connection in self.connections if connection.hello is not None), None)


class Engines:
    """All of kvtier's own engines. Started and closed in the event loop. `others` are names of models on vLLM."""

    def __init__(self, models: Sequence[ServedModel], others: Sequence[str] = ()) -> None:
        self.models = models
        self.known = ", ".join([*(model.name for model in models), *others])
        self._by_name = {name: model for model in models for name in model.names}
        for connection in self.connections:
            connection.on_wrong_kv = self._stop_loading

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

    def _stop_loading(self, found: EngineConnection) -> None:
        """The canary of one engine found wrong KV: others of its namespace load nothing either."""
        if found.hello is None:
            return
        because = f"the engine {found.name} says that {found.loading_off}"
        for other in self.connections:
            if other is not found and other.hello is not None and other.hello.namespace == found.hello.namespace:
                other.stop_loading(because)

    def cut_off(self, sentence: str) -> None:
        """End all requests in flight with an error with this sentence."""
        for connection in self.connections:
            connection.cut_off(sentence)

    def find(self, name: str) -> ServedModel:
        """Raises `UnknownModel`, which lists the known names."""
        found = self._by_name.get(name)
        if found is None:
            raise unknown_model(name, self.known)
        return found

    def snapshot(self) -> list[ModelSnapshot]:
        """What another process needs to read a body."""
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

    async def submit(self, model: ServedModel, question: PromptRequest) -> Answers:
        """Send a prompt to one of the model's engines. Raises as `EngineConnection.submit`."""
        error = _unavailable(model)
        left = list(model.connections)
        while candidates := _in_order(left, question):
            try:
                return await candidates[0].submit(question)
            except EngineStopped as stopped:  # it had not taken the prompt, so another engine can
                left.remove(candidates[0])
                error = stopped
        raise error

    async def tokenize(self, model: ServedModel, prompt: Prompt | EncodedPrompt) -> list[int]:
        """The tokens of a prompt, by any of the model's engines. Raises as `EngineConnection.tokenize`."""
        return (await self.tokenized(model, prompt, with_texts=False)).token_ids

    async def tokenized(self, model: ServedModel, prompt: Prompt | EncodedPrompt, *, with_texts: bool) -> Tokenized:
        """The tokens of a prompt; `with_texts` adds each token's text in the vocabulary."""
        return await _first(model, lambda connection: connection.tokenize(prompt, with_texts=with_texts))

    async def detokenize(self, model: ServedModel, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens, by any of the model's engines. Raises as `EngineConnection.detokenize`."""
        return await _first(
            model, lambda connection: connection.detokenize(token_ids, skip_special_tokens=skip_special_tokens)
        )


async def _first(model: ServedModel, ask: Callable[[EngineConnection], Awaitable[_Reply]]) -> _Reply:
    """The reply of the model's least busy engine, or of the next one if that stops before it answers."""
    error = _unavailable(model)
    for connection in sorted(_up(model.connections), key=lambda one: one.num_requests):
        try:
            return await ask(connection)
        except EngineStopped as stopped:
            error = stopped
    raise error


def find_model(models: Sequence[_Model], name: str) -> _Model:
    """Raises `UnknownModel`, which lists the known names."""
    for model in models:
        if name in model.names:
            return model
    raise unknown_model(name, ", ".join(one.name for one in models))


def unknown_model(name: str, known: str) -> UnknownModel:
    shown = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..."
    return UnknownModel(f"the model {shown!r} is not served here; available: {known}")


def _up(connections: Sequence[EngineConnection]) -> list[EngineConnection]:
    return [connection for connection in connections if connection.hello is not None and not connection.is_hung]


def _unavailable(model: ServedModel) -> EngineStopped:
    is_hung = any(connection.is_hung for connection in model.connections)
    return EngineAway(f"the model {model.name} {'does not answer' if is_hung else 'is starting'}")


def _in_order(connections: Sequence[EngineConnection], question: PromptRequest) -> list[EngineConnection]:
    """Connected engines, best first: the one for prompts of this session, or with this beginning.

    An engine that is much busier than the least busy one comes later.
    """
    up = _up(connections)
    if len(up) < 2:
        return up
    least = min(connection.num_requests for connection in up)
    group = f"session {question.session}" if question.session else beginning_of(question.prompt)
    affinity = f"{question.salt}\n{group}".encode(errors="replace")

    def rank(connection: EngineConnection) -> tuple[bool, int, bytes]:
        is_busy = connection.num_requests > least + _AFFINITY_SLACK
        weight = hashlib.sha256(connection.name.encode() + affinity).digest()
        return is_busy, connection.num_requests if is_busy else 0, weight

    return sorted(up, key=rank)


def beginning_of(prompt: Prompt | EncodedPrompt) -> str:
    """The prompt's beginning as text, which prompts with a common beginning share."""
    if isinstance(prompt, EncodedPrompt):
        return prompt.beginning
    if isinstance(prompt, TextPrompt):
        return prompt.text[:_AFFINITY_CHARACTERS]
    if isinstance(prompt, ChatPrompt):
        first = (f"{one.role}: {one.content[:_AFFINITY_CHARACTERS]}" for one in prompt.messages[:2])
        return "\n".join(first)[:_AFFINITY_CHARACTERS]
    return repr(prompt.token_ids[:_AFFINITY_TOKENS])
