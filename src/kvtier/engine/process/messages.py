"""The messages between an engine's process and its clients over a Unix socket. No torch, no sockets.

A message is its length in four bytes, little-endian, and then that many bytes of msgpack. The engine sends first, with
`EngineHello`. A client numbers its requests; every reply about a request carries its number. Both ends are the same
release on the same host: there is no version to negotiate.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvtier.engine.answer import StreamPiece
from kvtier.engine.grammar import Grammar
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import PromptTooLong, RemoteProtocolError
from kvtier.observe.recent_warnings import LoggedWarning
from kvtier.sizes import format_size
from kvtier.tiers.parting import Parting
from kvtier.tiers.retention import RetentionAsk, RetentionOutcome

_Kind = TypeVar("_Kind")

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
MAX_MESSAGE_BYTES = 256 << 20
MAX_PROMPT_END_CHARACTERS = 64
MAX_SPECIAL_TOKENS = 4096


class _Message(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    pass


# --- prompts ---------------------------------------------------------------------------------------------------------


class TextPrompt(_Message, frozen=True, tag="text"):
    """Text as it is; with `adds_special_tokens`, behind those with which the tokenizer starts every text.

    With a `suffix`, the answer is what stands between the two: for models that have tokens for that.
    """

    text: str
    adds_special_tokens: bool = True
    suffix: str = ""

    @property
    def num_characters(self) -> int:
        return len(self.text) + len(self.suffix)


class TokenPrompt(_Message, frozen=True, tag="tokens"):
    token_ids: list[int]


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that an earlier answer made; `arguments` is a JSON object as templates read it."""

    name: str
    arguments: dict[str, object]
    call_id: str = ""


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`name` is a speaker's, or, if `role` is "tool", that of the tool; `call_id` is the call that it answers.

    `reasoning` is what the model thought before an earlier answer. Templates see only the fields that are set.
    """

    role: str
    content: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    call_id: str | None = None
    num_more_characters: int = 0
    """JSON values in the calls' arguments, as the reader of the body counted them."""

    @property
    def num_characters(self) -> int:
        fixed = len(self.content) + len(self.name or "") + len(self.reasoning or "")
        return fixed + self.num_more_characters


class ChatPrompt(_Message, frozen=True, tag="chat"):
    """A conversation for the model's chat template; `template_values` are further names for it, plain JSON values.

    `tools` are as in OpenAI's API (`{"type": "function", "function": {...}}`), with the client's order of tools and
    keys: a prompt's beginning is stable only if nothing in it moves. Some templates begin the model's thinking at the
    prompt's end. The answer then follows `grammar_in_thought`, which allows the rest of the thought, instead of the
    grammar in the sampling parameters.
    """

    messages: list[ChatMessage]
    template_values: dict[str, object] = {}
    tools: list[dict[str, object]] = []
    num_tool_characters: int = 0
    """The characters of `tools`, as the reader of the body counted them."""
    grammar_in_thought: Grammar | None = None
    adds_generation_prompt: bool = True
    """Whether the template writes the beginning of an answer."""

    @property
    def num_characters(self) -> int:
        return self.num_tool_characters + sum(message.num_characters for message in self.messages)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


class EncodedPrompt(msgspec.Struct, frozen=True):
    """A prompt that was encoded elsewhere; `beginning` is text that prompts with a common prefix share."""

    encoded: msgspec.Raw
    beginning: str


# --- to the engine ---------------------------------------------------------------------------------------------------


class Submit(_Message, frozen=True, tag="submit"):
    """Answer a prompt. `kvtier explain` knows it by `request_id`; prompts share blocks if their `salt` is equal.

    If many prompts wait, clients take turns: `client` names the caller. Prompts of one `session` are compared with each
    other; with `explains`, one `Parted` says where this one diverges from them. With `warms`, it is only meant to fill
    the cache: it is compared with nothing, and tiers below the device get all of it. With `retention`, the prompt or
    parts of it are to stay cached, and one `Retained` reports the outcome.
    """

    number: int
    request_id: str
    prompt: Prompt
    params: SamplingParams
    salt: str = ""
    client: str = ""
    session: str = ""
    explains: bool = False
    warms: bool = False
    retention: list[RetentionAsk] = []


class EncodedSubmit(_Message, frozen=True, tag="submit"):
    """A `Submit` as it is sent: prompts of one request share what is encoded once."""

    number: int
    request_id: str
    prompt: msgspec.Raw
    params: msgspec.Raw
    salt: str = ""
    client: str = ""
    session: str = ""
    explains: bool = False
    warms: bool = False
    retention: Sequence[RetentionAsk] = ()


class Abort(_Message, frozen=True, tag="abort"):
    """Its client has stopped waiting. The engine sends nothing more about it, except what was already on its way."""

    number: int


class Tokenize(_Message, frozen=True, tag="tokenize"):
    """Asks for the tokens of a prompt. Nothing is computed; the answer is a `Tokenized` or a `Refused`."""

    number: int
    prompt: Prompt
    with_texts: bool = False


class EncodedTokenize(_Message, frozen=True, tag="tokenize"):
    """A `Tokenize` as it is sent."""

    number: int
    prompt: msgspec.Raw
    with_texts: bool = False


class Detokenize(_Message, frozen=True, tag="detokenize"):
    """Asks for the text of tokens. The answer is a `Detokenized` or a `Refused`."""

    number: int
    token_ids: list[int]
    skip_special_tokens: bool = False


class AskMetrics(_Message, frozen=True, tag="ask_metrics"):
    number: int


class ResumeLoading(_Message, frozen=True, tag="resume_loading"):
    """Load from the tiers again, if the canary had stopped that. Answered by `Metrics`."""

    number: int


class StopLoading(_Message, frozen=True, tag="stop_loading"):
    """Load nothing from the tiers, as if the engine's own canary had found wrong KV. Answered by `Metrics`."""

    number: int
    because: str


class AskParting(_Message, frozen=True, tag="ask_parting"):
    """Asks where a request's prompt diverged. Answered by `Parted`."""

    number: int
    request_id: str


class AskWarnings(_Message, frozen=True, tag="ask_warnings"):
    """Asks for the last warnings of the engine's log. Answered by `Warnings`."""

    number: int


class AskUsedPrefixes(_Message, frozen=True, tag="ask_used_prefixes"):
    """Asks which prefixes prompts began with since the last such message, and names those to count from now on.

    `ends` joins the hashes of their last blocks. Answered by `UsedPrefixes`.
    """

    number: int
    ends: bytes


ToEngine = (
    Submit
    | Abort
    | Tokenize
    | Detokenize
    | AskMetrics
    | AskParting
    | AskWarnings
    | AskUsedPrefixes
    | ResumeLoading
    | StopLoading
)


# --- from the engine -------------------------------------------------------------------------------------------------


class EngineHello(_Message, frozen=True, tag="hello"):
    """The description of the engine.

    `weights_bytes` and `kv_bytes` are on the device, `namespace` is in hex; what a model lacks is empty.
    `default_options` are its makers' sampling defaults, by the names of `SamplingParams`. `special_tokens` are the ids
    of tokens that an answer's text leaves out, by their texts; `tool_template` is the chat template for conversations
    with tools, if it is a separate one. Without `takes_several_calls` the template refuses an assistant's message with
    more than one.
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
    special_tokens: dict[str, int] = {}
    tool_template: str = ""
    takes_several_calls: bool = True


class Accepted(_Message, frozen=True, tag="accepted"):
    """A prompt is in the engine's queue. `prompt_end` is the last text of a conversation as its template wrote it."""

    number: int
    prompt_tokens: int
    prompt_end: str = ""


class Refused(_Message, frozen=True, tag="refused"):
    """A prompt is not served, or no longer. `reason` says whose fault that is."""

    number: int
    reason: str
    sentence: str


TOO_LONG = "too_long"
INVALID = "invalid"
GRAMMAR = "grammar"
STOPPED = "stopped"
FAILED = "failed"


class Tokenized(_Message, frozen=True, tag="tokenized"):
    """`texts` are the tokens as in the tokenizer's vocabulary, if they were requested."""

    number: int
    token_ids: list[int]
    texts: list[str] = []


class Detokenized(_Message, frozen=True, tag="detokenized"):
    number: int
    text: str


class StepOutputs(_Message, frozen=True, tag="outputs", omit_defaults=True):
    """One step's results for all requests of this connection: pieces with the numbers of their requests.

    `token_bytes` has the bytes of every token in a piece's logprobs. A completion comes without text and logprobs,
    which its pieces have already carried, and without the tiers that had nothing cached.
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
    """`loading_off` says why nothing is loaded from the tiers; empty while loading is on.

    `was_told` if it was a `StopLoading` and not the engine's own canary.
    """

    number: int
    families: list[MetricFamily]
    loading_off: str = ""
    was_told: bool = False


class Parted(_Message, frozen=True, tag="parted"):
    """`parting` is None if nothing is known of the prompt."""

    number: int
    parting: Parting | None


class Warnings(_Message, frozen=True, tag="warnings"):
    number: int
    warnings: list[LoggedWarning]


class UsedPrefixes(_Message, frozen=True, tag="used_prefixes"):
    """For each used prefix the hash of its last block, the number of prompts, and the seconds since the last one."""

    number: int
    uses: list[tuple[bytes, int, float]]


class Retained(_Message, frozen=True, tag="retained"):
    """One outcome for each part of the prompt that was to stay cached."""

    number: int
    outcomes: list[RetentionOutcome]


FromEngine = (
    EngineHello
    | Accepted
    | Refused
    | Tokenized
    | Detokenized
    | StepOutputs
    | Metrics
    | Parted
    | Warnings
    | UsedPrefixes
    | Retained
)

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(ToEngine)
_replies = msgspec.msgpack.Decoder(FromEngine)
_prompts = msgspec.msgpack.Decoder(Prompt)


def encode_part(part: Prompt | SamplingParams) -> bytes:
    """For an `EncodedSubmit` or an `EncodedTokenize`."""
    return _encoder.encode(part)


def decode_prompt(encoded: msgspec.Raw) -> Prompt:
    """The reverse of `encode_part`."""
    prompt: Prompt = _decode(_prompts, encoded)
    return prompt


def encode(message: ToEngine | EncodedSubmit | EncodedTokenize | FromEngine) -> bytes:
    """Raises `PromptTooLong` for a message so large that its receiver would drop the whole connection."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise PromptTooLong(f"the prompt takes more than {format_size(MAX_MESSAGE_BYTES)}")
    return _LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """Raises `RemoteProtocolError` for a message that no kvtier process would send."""
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


def _decode(decoder: msgspec.msgpack.Decoder[_Kind], body: bytes | msgspec.Raw) -> _Kind:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"a message that cannot be read: {error}") from error
