"""Encodes the answers of OpenAI's API: stream chunks, whole answers, usage, models and errors, all as bytes.

Streams have thousands of chunks per second: the part that all chunks of an answer share is encoded once.
"""

from __future__ import annotations

import codecs
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from kvtier.api.chat.answer_readers import AnswerReaders
from kvtier.api.chat.input_text import InputText, input_text
from kvtier.api.chat.parts import AnswerPart, CallArguments, CallBegin, ReasoningPart, TextPart, WholeCall
from kvtier.api.chat.tool import CUSTOM, FUNCTION
from kvtier.api.generation import GenerationRequest, Usage, WholeAnswer
from kvtier.api.http_error import HttpError, http_error_of
from kvtier.api.logprobs import EncodedLogprobs, SampledToken, encode_items, joined
from kvtier.engine.answer import StreamPiece
from kvtier.errors import KvtierError

_DONE = b"data: [DONE]\n\n"
_new_decoder = functools.partial(codecs.getincrementaldecoder("utf-8"), "replace")

_encode = msgspec.json.Encoder().encode
_FINGERPRINT_CHARACTERS = 12
_MAX_SENTENCE_CHARACTERS = 1000


# --- chats and completions --------------------------------------------------------------------------------------------


class _CachedTokens(msgspec.Struct):
    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]
    parted: dict[str, object] | msgspec.UnsetType = msgspec.UNSET
    retention: list[dict[str, object]] | msgspec.UnsetType = msgspec.UNSET


class _ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int


class _UsageDocument(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _CachedTokens
    completion_tokens_details: _ReasoningTokens | msgspec.UnsetType = msgspec.UNSET


class _OpenAiEncoder(ABC):
    """The encoder that chats and completions share. Chunks are server-sent events that differ in their choice alone."""

    media_type = "text/event-stream"
    kind: str
    chunk_kind: str

    def __init__(self, asked: GenerationRequest, request_id: str) -> None:
        self._asked = asked
        self._request_id = request_id
        self._head = b"data: " + _encode(self._heading(self.chunk_kind))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if asked.includes_usage else b"]}\n\n"

    @abstractmethod
    def choice(self, index: int, answer: WholeAnswer) -> msgspec.Struct:
        """A whole answer."""

    def begin(self, prompt_ends: Sequence[str]) -> None:  # noqa: B027
        """Ignores the ends of the prompts; encoders that need them override this."""

    def end(self, usage: Usage) -> bytes:
        if not self._asked.includes_usage:
            return _DONE
        return self._head + b'],"usage":' + _encode(self.usage(usage)) + b"}\n\n" + _DONE

    def error(self, error: Exception) -> bytes:
        """An error event, which the official client raises. No `DONE` follows: the answer is incomplete."""
        if not isinstance(error, KvtierError):
            raise error
        return b"data: " + error_body(http_error_of(error)) + b"\n\n"

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        fields = {**self._heading(self.kind), "choices": choices, "usage": self.usage(usage)}
        return _encode({**fields, **self.more(answers)})

    def usage(self, usage: Usage) -> msgspec.Struct:
        return _usage_document(usage)

    def more(self, answers: Sequence[WholeAnswer]) -> dict[str, object]:
        """Further top-level fields of a whole response."""
        return {}

    def incomplete(self, reason: str | None) -> str:
        return "the engine stopped before the answer was complete"

    def _event(self, choice: msgspec.Struct) -> bytes:
        return self._head + _encode(choice) + self._tail

    def _heading(self, kind: str) -> dict[str, object]:
        """The fields that every chunk of an answer, and every whole answer, begins with."""
        hello = self._asked.model.hello
        return {
            "id": self._request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._asked.name,
            "system_fingerprint": None if hello is None else f"fp_{hello.namespace[:_FINGERPRINT_CHARACTERS]}",
        }


def prompt_list(answer: WholeAnswer) -> msgspec.Raw | msgspec.UnsetType:
    """The log-probabilities of an answer's prompt, if the request asks for them."""
    if answer.prompt_logprobs is None:
        return msgspec.UNSET
    return msgspec.Raw(b"[" + b",".join(answer.prompt_logprobs) + b"]")


def _usage_document(usage: Usage) -> _UsageDocument:
    return _UsageDocument(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        _CachedTokens(sum(usage.cached_tokens.values()), usage.cached_tokens, usage.parted, usage.retained),
    )


# --- chat -------------------------------------------------------------------------------------------------------------


class _ChatLogprobs(msgspec.Struct):
    content: Sequence[SampledToken] | msgspec.Raw
    refusal: None = None


class _Function(msgspec.Struct, omit_defaults=True):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class _CustomInput(msgspec.Struct, omit_defaults=True):
    name: str | msgspec.UnsetType = msgspec.UNSET
    input: str | msgspec.UnsetType = msgspec.UNSET


class _CallDelta(msgspec.Struct, omit_defaults=True):
    """The first delta of a call has all fields; later deltas have the next characters of its arguments or input."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: _Function | msgspec.UnsetType = msgspec.UNSET
    custom: _CustomInput | msgspec.UnsetType = msgspec.UNSET


class _Call(msgspec.Struct):
    """A call of a function or of a custom tool."""

    id: str
    type: str
    function: _Function | msgspec.UnsetType = msgspec.UNSET
    custom: _CustomInput | msgspec.UnsetType = msgspec.UNSET


class _Delta(msgspec.Struct, omit_defaults=True):
    """Reasoning has two field names: each client knows one of them."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[_CallDelta] | msgspec.UnsetType = msgspec.UNSET


class _ChatChunkChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: _ChatLogprobs | None = None
    finish_reason: str | None = None


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[_Call] | msgspec.UnsetType = msgspec.UNSET


class _ChatChoice(msgspec.Struct):
    index: int
    message: _ChatMessage
    logprobs: _ChatLogprobs | None
    finish_reason: str | None


class ChatEncoder(_OpenAiEncoder):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, asked: GenerationRequest, request_id: str) -> None:
        super().__init__(asked, request_id)
        self._begun: set[int] = set()
        self._readers = AnswerReaders(asked.form, asked.params.n)
        self._inputs: dict[int, InputText] = {}

    def begin(self, prompt_ends: Sequence[str]) -> None:
        self._readers.begin(prompt_ends)

    def chunk(
        self, choice: int, piece: StreamPiece, logprobs: Sequence[SampledToken] | None, prompt_tokens: int
    ) -> bytes:
        """The first token is preceded by the role; the finish reason has an event of its own."""
        events = b""
        if choice not in self._begun:
            self._begun.add(choice)
            events = self._event(_ChatChunkChoice(choice, _Delta("assistant", "")))
        deltas = [delta for part in self._readers.push(choice, piece) for delta in self._deltas(choice, part)]
        if piece.completion is not None:
            deltas += self._rest_of_input(choice, self._readers.num_calls(choice) - 1)
        if logprobs and not deltas:
            deltas = [_Delta(content="")]  # the text is held back: it may be the start of a marker
        shown = _chat_logprobs(logprobs)
        for delta in deltas:
            events += self._event(_ChatChunkChoice(choice, delta, shown))
            shown = None
        if piece.completion is not None:
            reason = self._readers.finish_reason(choice, piece.completion)
            events += self._event(_ChatChunkChoice(choice, _Delta(), None, reason))
        return events

    def choice(self, index: int, answer: WholeAnswer) -> msgspec.Struct:
        parts = self._readers.whole(index, answer)
        message = _ChatMessage("assistant", parts.text if parts.text or not parts.calls else None)
        if parts.reasoning:
            message.reasoning_content = message.reasoning = parts.reasoning
        if parts.calls:
            message.tool_calls = list(map(self._call, parts.calls))
        logprobs = None if answer.logprobs is None else _ChatLogprobs(joined(answer.logprobs))
        return _ChatChoice(index, message, logprobs, self._readers.finish_reason(index, answer.completion))

    def _call(self, call: WholeCall) -> _Call:
        if self._is_custom(call.name):
            return _Call(call.call_id, CUSTOM, custom=_CustomInput(call.name, input_text(call.arguments)))
        return _Call(call.call_id, FUNCTION, _Function(call.name, call.arguments))

    def _deltas(self, choice: int, part: AnswerPart) -> list[_Delta]:
        """The deltas for a part. A call of a custom tool has an input instead of arguments."""
        if isinstance(part, CallBegin):
            rest = self._rest_of_input(choice, part.number - 1)
            if not self._is_custom(part.name):
                return [*rest, _delta(part)]
            self._inputs[choice] = InputText()
            begun = _CallDelta(part.number, part.call_id, CUSTOM, custom=_CustomInput(part.name, ""))
            return [*rest, _Delta(tool_calls=[begun])]
        text = self._inputs.get(choice)
        if text is None or not isinstance(part, CallArguments):
            return [_delta(part)]
        return _input_deltas(part.number, text.push(part.text))

    def _rest_of_input(self, choice: int, number: int) -> list[_Delta]:
        """What is left of the input of call `number`, which is complete."""
        text = self._inputs.pop(choice, None)
        return [] if text is None else _input_deltas(number, text.finish())

    def _is_custom(self, name: str) -> bool:
        return self._asked.form.call_kinds.get(name) == CUSTOM

    def usage(self, usage: Usage) -> msgspec.Struct:
        document = _usage_document(usage)
        if self._readers.splits_reasoning:
            document.completion_tokens_details = _ReasoningTokens(self._readers.num_reasoning_tokens)
        return document

    def logprobs(self, choice: int, tokens: Sequence[SampledToken]) -> EncodedLogprobs:
        return (encode_items(tokens),)

    def more(self, answers: Sequence[WholeAnswer]) -> dict[str, object]:
        """All answers share one prompt; its log-probabilities are a top-level field, as in vLLM."""
        found = prompt_list(answers[0])
        return {} if isinstance(found, msgspec.UnsetType) else {"prompt_logprobs": found}


def _delta(part: AnswerPart) -> _Delta:
    if isinstance(part, TextPart):
        return _Delta(content=part.text)
    if isinstance(part, ReasoningPart):
        return _Delta(reasoning_content=part.text, reasoning=part.text)
    if isinstance(part, CallBegin):
        return _Delta(tool_calls=[_CallDelta(part.number, part.call_id, FUNCTION, _Function(part.name, ""))])
    return _Delta(tool_calls=[_CallDelta(part.number, function=_Function(arguments=part.text))])


def _input_deltas(number: int, text: str) -> list[_Delta]:
    return [_Delta(tool_calls=[_CallDelta(number, custom=_CustomInput(input=text))])] if text else []


def _chat_logprobs(tokens: Sequence[SampledToken] | None) -> _ChatLogprobs | None:
    return None if tokens is None else _ChatLogprobs(tokens)


# --- completions ------------------------------------------------------------------------------------------------------


class _TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class _WholeTextLogprobs(msgspec.Struct):
    """`_TextLogprobs` with encoded fields."""

    tokens: msgspec.Raw
    token_logprobs: msgspec.Raw
    top_logprobs: msgspec.Raw
    text_offset: msgspec.Raw


class _TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: _TextLogprobs | _WholeTextLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class CompletionEncoder(_OpenAiEncoder):
    kind = chunk_kind = "text_completion"

    def __init__(self, asked: GenerationRequest, request_id: str) -> None:
        super().__init__(asked, request_id)
        self._offsets: dict[int, int] = {}
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        """A character may be cut between tokens: it counts once, where its first token begins."""

    def chunk(
        self, choice: int, piece: StreamPiece, logprobs: Sequence[SampledToken] | None, prompt_tokens: int
    ) -> bytes:
        if not piece.text and not logprobs and piece.completion is None:
            return b""
        reason = None if piece.completion is None else piece.completion.finish_reason
        shaped = None if logprobs is None else self._shaped(choice, logprobs)
        return self._event(_TextChoice(choice, piece.text, shaped, reason))

    def choice(self, index: int, answer: WholeAnswer) -> msgspec.Struct:
        pieces = answer.logprobs
        logprobs = None if pieces is None else _WholeTextLogprobs(*(joined(pieces, number) for number in range(4)))
        return _TextChoice(index, answer.text, logprobs, answer.finish_reason, prompt_list(answer))

    def logprobs(self, choice: int, tokens: Sequence[SampledToken]) -> EncodedLogprobs:
        shaped = self._shaped(choice, tokens)
        return (
            encode_items(shaped.tokens),
            encode_items(shaped.token_logprobs),
            encode_items(shaped.top_logprobs),
            encode_items(shaped.text_offset),
        )

    def _shaped(self, choice: int, tokens: Sequence[SampledToken]) -> _TextLogprobs:
        """Log-probabilities with offsets into the text (and an echoed prompt); the top ones include the sampled token.

        The first token of a prompt has no log-probabilities.
        """
        shaped = _TextLogprobs([], [], [], [])
        offset = self._offsets.get(choice, 0)
        decoder = self._decoders.setdefault(choice, _new_decoder())
        for sampled in tokens:
            shaped.tokens.append(sampled.token)
            shaped.token_logprobs.append(sampled.logprob)
            likely = {one.token: one.logprob for one in reversed(sampled.top_logprobs)}
            shaped.top_logprobs.append(None if sampled.logprob is None else {sampled.token: sampled.logprob, **likely})
            shaped.text_offset.append(offset)
            offset += len(decoder.decode(bytes(sampled.bytes)))
        self._offsets[choice] = offset
        return shaped


# --- models and errors ------------------------------------------------------------------------------------------------


class ModelDocument(msgspec.Struct):
    """One document for the clients of both APIs: after `owned_by` come the fields that Anthropic's has."""

    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "kvtier"
    type: str = "model"
    display_name: str = ""
    created_at: str = ""
    max_input_tokens: int | None = None

    def __post_init__(self) -> None:
        self.display_name = self.id
        self.created_at = datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.max_input_tokens = self.max_model_len


def model_list(models: list[ModelDocument]) -> bytes:
    """All models are on the one page."""
    ends = {"first_id": models[0].id if models else None, "last_id": models[-1].id if models else None}
    return _encode({"object": "list", "data": models, "has_more": False, **ends})


def one_model(model: ModelDocument) -> bytes:
    return _encode(model)


def error_body(error: HttpError) -> bytes:
    sentence = error.sentence
    if len(sentence) > _MAX_SENTENCE_CHARACTERS:
        sentence = sentence[: _MAX_SENTENCE_CHARACTERS - 3] + "..."
    fields = {
        "message": sentence,
        "type": _error_type(error.status),
        "param": error.parameter,
        "code": error.code or None,
    }
    return _encode({"error": fields})


def _error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
