"""The models that are served, and the engines behind each: which of them gets a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.api.engine_connection import Answers, EngineConnection
from kvtier.engine.process.messages import ChatPrompt, Hello, Prompt, TextPrompt
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import EngineAway, EngineStopped, UnknownModel

_AFFINITY_SLACK = 4
"""An engine that has so many requests more than the idlest one is passed over, also for a prompt it knows."""

_AFFINITY_CHARACTERS = 2048
_AFFINITY_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model by the names that clients call it, the first being its own.

    `default_options` are fields of `SamplingParams` for requests that do not give them.
    """

    names: Sequence[str]
    connections: Sequence[EngineConnection]
    default_options: Mapping[str, object] = field(default_factory=dict)

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
        """What its engines are; None while none of them is there."""
        return next((connection.hello for connection in self.connections if connection.hello is not None), None)


class Engines:
    """All of them. `start` in the event loop, `close` there too."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = models
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

    def find(self, name: str) -> ServedModel:
        """Raises `UnknownModel` with the names there are."""
        model = self._by_name.get(name)
        if model is None:
            known = ", ".join(one.name for one in self.models)
            raise UnknownModel(f"the model {name!r} is not served here; there is {known}")
        return model

    async def submit(
        self, model: ServedModel, prompt: Prompt, params: SamplingParams, *, request_id: str, salt: str = ""
    ) -> Answers:
        """Hand a prompt to one of the model's engines. Raises as `EngineConnection.submit` does."""
        is_hung = any(connection.is_hung for connection in model.connections)
        error: EngineStopped = EngineAway(f"the model {model.name} {'does not answer' if is_hung else 'is starting'}")
        left = list(model.connections)
        while there := _in_order(left, prompt, salt):
            try:
                return await there[0].submit(prompt, params, request_id=request_id, salt=salt)
            except EngineStopped as stopped:  # before it took the prompt: another one may, also one that came meanwhile
                left.remove(there[0])
                error = stopped
        raise error


def _in_order(connections: Sequence[EngineConnection], prompt: Prompt, salt: str) -> list[EngineConnection]:
    """Those that answer, the best one first: where prompts that begin alike went, unless it is much busier."""
    there = [connection for connection in connections if connection.hello is not None and not connection.is_hung]
    if len(there) < 2:
        return there
    idlest = min(connection.num_requests for connection in there)
    beginning = _beginning(prompt, salt)

    def rank(connection: EngineConnection) -> tuple[bool, int, bytes]:
        is_busy = connection.num_requests > idlest + _AFFINITY_SLACK
        weight = hashlib.sha256(connection.name.encode() + beginning).digest()
        return is_busy, connection.num_requests if is_busy else 0, weight

    return sorted(there, key=rank)


def _beginning(prompt: Prompt, salt: str) -> bytes:
    if isinstance(prompt, TextPrompt):
        text = prompt.text[:_AFFINITY_CHARACTERS]
    elif isinstance(prompt, ChatPrompt):
        text = "\n".join(f"{message.role}: {message.content}" for message in prompt.messages[:2])[:_AFFINITY_CHARACTERS]
    else:
        text = repr(prompt.token_ids[:_AFFINITY_TOKENS])
    return f"{salt}\n{text}".encode(errors="replace")
