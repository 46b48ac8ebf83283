"""Messages between the HTTP server and the processes that read large bodies for it, in msgpack.

A message is four bytes of length, then msgpack. A request is followed by the raw body. One request is in flight at a
time.
"""

from __future__ import annotations

import struct

import msgspec

from kvtier.api.answer_form import PLAIN, AnswerForm
from kvtier.api.config import AUTO
from kvtier.api.prompt_form import SILENT, PromptForm
from kvtier.api.retention import NO_WISH, RetentionWish
from kvtier.engine.process.messages import EngineHello
from kvtier.engine.sampling_params import SamplingParams

OPENAI_CHAT = "openai chat"
OPENAI_COMPLETION = "openai completion"
TOKENIZE = "tokenize"
DETOKENIZE = "detokenize"
OLLAMA_CHAT = "ollama chat"
OLLAMA_GENERATE = "ollama generate"
OLLAMA_EMBED = "ollama embed"
OLLAMA_EMBEDDINGS = "ollama embeddings"
OPENAI_RESPONSE = "/v1/responses"
ANTHROPIC_MESSAGE = "/v1/messages"
ANTHROPIC_COUNT = "/v1/messages/count_tokens"
"""Kinds that are paths are also the paths at vLLM."""

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size


class ModelSnapshot(msgspec.Struct, frozen=True):
    """What reading a body needs of a model."""

    names: list[str]
    options: dict[str, object]
    hello: EngineHello | None
    is_vllm: bool = False
    tool_format: str = AUTO
    reasoning_format: str = AUTO

    @property
    def name(self) -> str:
        return self.names[0]


class ReadBody(msgspec.Struct, frozen=True):
    """Asks for a body to be read. `kind` is one of those above, or a path that only vLLM serves; the body follows.

    `salt` is the tenant's; `has_keys` says whether the deployment has API keys.
    """

    kind: str
    num_bytes: int
    models: list[ModelSnapshot]
    salt: str = ""
    has_keys: bool = False


class BodyRefused(msgspec.Struct, frozen=True, tag=True):
    """The body is refused: the fields of an `HttpError`."""

    status: int
    sentence: str
    code: str
    parameter: str | None
    headers: dict[str, str]


class BodyAsks(msgspec.Struct, frozen=True, tag=True):
    """A `GenerationRequest`. Prompts are encoded for an engine; `beginnings` has each one's beginning as plain text."""

    name: str
    model: str
    prompts: list[msgspec.Raw]
    beginnings: list[str]
    params: SamplingParams
    is_streamed: bool
    includes_usage: bool
    cache_salt: str
    form: AnswerForm = PLAIN
    record: bytes = b""
    prompt_form: PromptForm = SILENT
    session: str = ""
    explains: bool = False
    prefix: str = ""
    retention: RetentionWish = NO_WISH
    grammar_field: str = ""


class BodyPasses(msgspec.Struct, frozen=True, tag=True):
    """A body for an engine of vLLM. `body` replaces the client's bytes; None if these are sent unchanged.

    `name` is the client's name for the model, `model` its main name; `keys` are the prefix keys of its prompt. It may
    continue the response `previous`.
    """

    name: str
    model: str
    path: str
    body: bytes | None
    is_streamed: bool
    num_answers: int
    keys: list[int]
    previous: str = ""


class BodyLoads(msgspec.Struct, frozen=True, tag=True):
    """A body of Ollama's API without a prompt."""

    name: str
    done_reason: str


BodyReply = BodyRefused | BodyAsks | BodyLoads | BodyPasses

_encoder = msgspec.msgpack.Encoder()
_questions = msgspec.msgpack.Decoder(ReadBody)
_replies: msgspec.msgpack.Decoder[BodyReply] = msgspec.msgpack.Decoder(BodyReply)


def framed(message: ReadBody | BodyReply) -> tuple[bytes, bytes]:
    """A message as two pieces to send, one after the other."""
    encoded = _encoder.encode(message)
    return _LENGTH.pack(len(encoded)), encoded


def length_of(head: bytes) -> int:
    return int(_LENGTH.unpack(head)[0])


def decode_question(body: bytes) -> ReadBody:
    return _questions.decode(body)


def decode_reply(body: bytes) -> BodyReply:
    return _replies.decode(body)
