"""What an engine's process and those who ask it say to each other over a Unix socket. No torch, no sockets.

A message is four bytes of length, little-endian, and so many bytes of msgpack. The engine speaks first, with `Hello`.
Whoever asks numbers its requests; everything the engine says of one carries that number. Both ends are the same
release on the same host: there is no version to agree on.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from kvtier.engine.answer import StreamPiece
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import PromptTooLong, RemoteProtocolError
from kvtier.sizes import format_size

_Kind = TypeVar("_Kind")

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
MAX_MESSAGE_BYTES = 256 << 20


class _Message(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    pass


# --- prompts ---------------------------------------------------------------------------------------------------------


class TextPrompt(_Message, frozen=True, tag="text"):
    """Text as it stands; with `adds_special_tokens`, behind those the tokenizer starts every text with."""

    text: str
    adds_special_tokens: bool = True


class TokenPrompt(_Message, frozen=True, tag="tokens"):
    token_ids: list[int]


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str
    name: str | None = None

    @property
    def num_characters(self) -> int:
        return len(self.content) + len(self.name or "")


class ChatPrompt(_Message, frozen=True, tag="chat"):
    """A conversation for the model's chat template; `template_values` are further names for it, plain JSON values."""

    messages: list[ChatMessage]
    template_values: dict[str, object] = {}


Prompt = TextPrompt | TokenPrompt | ChatPrompt


class EncodedPrompt(msgspec.Struct, frozen=True):
    """A prompt that was encoded elsewhere; `beginning` is text that prompts which begin alike have in common."""

    encoded: msgspec.Raw
    beginning: str


# --- to the engine ---------------------------------------------------------------------------------------------------


class Submit(_Message, frozen=True, tag="submit"):
    """Answer a prompt. `kvtier explain` knows it by `request_id`; prompts share blocks if their `salt` is equal.

    Where many wait, clients take turns: `client` is whoever asked.
    """

    number: int
    request_id: str
    prompt: Prompt
    params: SamplingParams
    salt: str = ""
    client: str = ""


class EncodedSubmit(_Message, frozen=True, tag="submit"):
    """A `Submit` as it is sent: prompts of one request share what is encoded once."""

    number: int
    request_id: str
    prompt: msgspec.Raw
    params: msgspec.Raw
    salt: str = ""
    client: str = ""


class Abort(_Message, frozen=True, tag="abort"):
    """Nobody waits for it any more. The engine says nothing more of it, or what it had said already."""

    number: int


class AskMetrics(_Message, frozen=True, tag="ask_metrics"):
    number: int


ToEngine = Submit | Abort | AskMetrics


# --- from the engine -------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """What runs here, as people are told it.

    `weights_bytes` and `kv_bytes` are on the device, `namespace` is in hex; what a model lacks is empty.
    `default_options` is how its makers want it sampled, by the names of `SamplingParams`.
    """

    engine: str
    model: str
    architecture: str
    dtype: str
    quantization: str
    weights_bytes: int
    num_parameters: int
    vocab_size: int
    max_model_len: int
    block_tokens: int
    num_blocks: int
    kv_bytes: int
    device: str
    namespace: str
    has_tokenizer: bool
    chat_template: str
    started_at: float
    default_options: dict[str, float | int] = {}


class Accepted(_Message, frozen=True, tag="accepted"):
    """A prompt is in the engine's queue."""

    number: int
    prompt_tokens: int


class Refused(_Message, frozen=True, tag="refused"):
    """A prompt is not served, or not any more. `reason` says whose fault it is."""

    number: int
    reason: str
    sentence: str


TOO_LONG = "too_long"
INVALID = "invalid"
STOPPED = "stopped"
FAILED = "failed"


class StepOutputs(_Message, frozen=True, tag="outputs", omit_defaults=True):
    """What one step brought for all requests of this connection: pieces with the numbers of their requests.

    `token_bytes` are those of every token in a piece's logprobs. A completion comes without text and logprobs, which
    its pieces have brought, and without the tiers that had nothing cached.
    """

    pieces: list[tuple[int, StreamPiece]]
    token_bytes: dict[int, bytes] = {}


class Sample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: str
    documentation: str
    samples: list[Sample]


class Metrics(_Message, frozen=True, tag="metrics"):
    number: int
    families: list[MetricFamily]


FromEngine = Hello | Accepted | Refused | StepOutputs | Metrics

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(ToEngine)
_replies = msgspec.msgpack.Decoder(FromEngine)


def encode_part(part: Prompt | SamplingParams) -> bytes:
    """For an `EncodedSubmit`."""
    return _encoder.encode(part)


def encode(message: ToEngine | EncodedSubmit | FromEngine) -> bytes:
    """Raises `PromptTooLong` for a message that would be refused where it arrives, with all that comes after it."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise PromptTooLong(f"the prompt takes more than {format_size(MAX_MESSAGE_BYTES)}")
    return _LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """Raises `RemoteProtocolError` for a message that nobody of ours would send."""
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {format_size(length)}: the limit is {format_size(MAX_MESSAGE_BYTES)}")
    return int(length)


def decode_request(body: bytes) -> ToEngine:
    request: ToEngine = _decode(_requests, body)
    return request


def decode_reply(body: bytes) -> FromEngine:
    reply: FromEngine = _decode(_replies, body)
    return reply


def _decode(decoder: msgspec.msgpack.Decoder[_Kind], body: bytes) -> _Kind:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"a message that cannot be read: {error}") from error
